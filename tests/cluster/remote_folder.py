"""A file system that shows a folder as the NFS client of one machine does; it runs on Debian's `python3-fusepy`.

    /usr/bin/python3 remote_folder.py FOLDER MOUNT SECONDS

Each mount remembers for SECONDS what it learned, as NFS does with its defaults (`ac`, `lookupcache=all`): the attributes
of a path, that a name is absent, the listing of a folder. What other machines changed is therefore seen late. After
a change of its own it asks about that folder's names again, since the folder's change attribute is another; opening a
file asks too (close-to-open). A name whose creation failed is forgotten, the target of a failed rename is not. Locks
hold within a mount only.
"""

import os
import sys
import time
from pathlib import Path

from fusepy import FUSE, FuseOSError, Operations

FIELDS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime")


def names(folder):
    return [entry.name for entry in folder.iterdir()]


class Client(Operations):
    use_ns = True

    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), seconds
        self.known = {}  # (what was asked, path) → until when it is remembered, answer or error

    def _at(self, path):
        return self.folder / path.strip("/")

    def _ask(self, what, path):
        until, answer = self.known.get((what, path), (0.0, None))
        if time.monotonic() > until:
            try:
                answer = what(self._at(path))
            except OSError as error:
                answer = FuseOSError(error.errno)
            self.known[what, path] = time.monotonic() + self.seconds, answer
        if isinstance(answer, FuseOSError):
            raise answer
        return answer

    def _forget(self, *paths):
        """Forget these paths, what is below them, and the whole folders that list them, since their times changed."""
        for path in paths:
            parent = str(Path(path).parent)
            for known in list(self.known):
                if parent in (known[1], str(Path(known[1]).parent)) or known[1].startswith(f"{path}/"):
                    self.known.pop(known, None)

    def getattr(self, path, info=None):
        found = os.fstat(info.fh) if info else self._ask(Path.lstat, path)
        return {name: getattr(found, f"{name}_ns" if name.endswith("time") else name) for name in FIELDS}

    def readdir(self, path, info):
        return [".", "..", *self._ask(names, path)]

    def open(self, path, info):
        info.fh = os.open(self._at(path), info.flags & ~os.O_NONBLOCK)
        self.known.pop((Path.lstat, path), None)
        return 0

    def create(self, path, mode, info):
        try:
            info.fh = os.open(self._at(path), info.flags & ~os.O_NONBLOCK, mode)
        finally:
            self._forget(path)
        return 0

    def mkdir(self, path, mode):
        try:
            self._at(path).mkdir(mode)
        finally:
            self._forget(path)

    def link(self, target, source):
        try:
            os.link(self._at(source), self._at(target))
        finally:
            self._forget(source, target)

    def rename(self, old, new):
        self._at(old).rename(self._at(new))
        self._forget(old, new)

    def unlink(self, path):
        self._at(path).unlink()
        self._forget(path)

    def rmdir(self, path):
        self._at(path).rmdir()
        self._forget(path)

    def truncate(self, path, length, info=None):
        os.truncate(info.fh if info else self._at(path), length)
        self._forget(path)

    def write(self, path, data, offset, info):
        self.known.pop((Path.lstat, path), None)
        return os.pwrite(info.fh, data, offset)

    def utimens(self, path, times=None):
        os.utime(self._at(path), ns=times)
        self._forget(path)

    def chmod(self, path, mode):
        self._at(path).chmod(mode)
        self._forget(path)

    def read(self, path, size, offset, info):
        return os.pread(info.fh, size, offset)

    def readlink(self, path):
        return str(self._at(path).readlink())

    def release(self, path, info):
        os.close(info.fh)

    def fsync(self, path, data, info):
        os.fsync(info.fh)

    def statfs(self, path):
        found = os.statvfs(self._at(path))
        return {
            name: getattr(found, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")
        }


source, mount, seconds = sys.argv[1:]
# The kernel itself remembers nothing.
timeouts = {"entry_timeout": 0, "attr_timeout": 0, "negative_timeout": 0}
FUSE(Client(source, float(seconds)), mount, raw_fi=True, foreground=True, use_ino=True, **timeouts)
