"""How fast the stream alone is: rows from warm shards, cuts, masks and labels, tokens per second.

    python benchmarks/stream_cpu.py [--tokens 50_000_000] [--loaders 2]

The shards are written for the occasion (random ids; what they say does not matter for speed). The goal is over
20 million tokens/s on two cores, forty times what a 210M model takes on one large GPU.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from biphase import CLM, MLM, Chunks, Rows
from biphase.data.shards import Tokens
from biphase.data.stream import Stream, load_ahead
from biphase.objectives import Vocabulary

VOCAB = 128_256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--loaders", type=int, default=2)
    parser.add_argument("--rows", type=int, default=48, help="rows of 2,048 a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the loaders are the parallelism
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train-00000.bin"
        np.random.default_rng(0).integers(4, VOCAB, options.tokens, dtype=np.uint32).tofile(path)
        tokens = Tokens([path], np.dtype("<u4"))
        words = Vocabulary.of(VOCAB, 3, (0, 1, 2))
        for objective in (MLM(0.4), CLM()):
            for packing in (Chunks(2048), Rows(2048)):
                stream = Stream(tokens, packing, 1, 1, words)
                steps = min(stream.rows // options.rows, 400)

                def make(step, stream=stream, objective=objective):
                    return [
                        stream.batch(
                            objective, torch.arange(step * options.rows, (step + 1) * options.rows), step=0
                        )
                    ]

                list(load_ahead(make, 0, 10, loaders=options.loaders))
                began = time.perf_counter()
                count = sum(len(batches) for batches in load_ahead(make, 0, steps, loaders=options.loaders))
                speed = count * options.rows * 2048 / (time.perf_counter() - began)
                print(
                    f"{type(objective).__name__:<4} {type(packing).__name__:<7} {speed / 1e6:6.1f} million tokens/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
