"""Forward every frame between two interfaces, a fixed time after its arrival (netem, for kernels without it)."""

import socket
import sys
import time
from collections import deque
from select import select

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, SO_RCVBUFFORCE = 3, 263, 15, 33  # Linux; no names in Python


def opened(interface: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    # Checksum and segmentation of a frame may be pending: a header in front of it carries that through.
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
    link.bind((interface, 0))
    return link


def forward(one: socket.socket, two: socket.socket, seconds: float) -> None:
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait = max(0, held[0][0] - time.monotonic()) if held else None
        for link in select([one, two], [], [], wait)[0]:
            held.append((time.monotonic() + seconds, two if link is one else one, link.recv(1 << 17)))
        while held and held[0][0] <= time.monotonic():
            _, link, frame = held.popleft()
            link.send(frame)


if __name__ == "__main__":
    forward(opened(sys.argv[1]), opened(sys.argv[2]), float(sys.argv[3]))
