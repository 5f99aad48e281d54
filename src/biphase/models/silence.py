"""Transformers without its bars and reports, where what is wrong is said by us."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from transformers.utils import logging as told


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Nothing below an error, and no bar."""
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()
