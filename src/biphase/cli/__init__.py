"""The verbs, each in the order in which help lists them."""

from biphase.cli import study, models, machine  # noqa: F401, I001  (importing a file adds its verbs)
from biphase.cli.app import app, main

__all__ = ["app", "main"]
