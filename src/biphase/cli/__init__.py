"""The command line: importing the files of this package registers their verbs, in the order of --help."""

from biphase.cli import study, models  # noqa: F401, I001  (importing a file adds its verbs)
from biphase.cli.app import app, main

__all__ = ["app", "main"]
