"""Papers whose claims a study can test: one subpackage each, with a `PAPER` record. The engine knows none of them.

A study names them: `Study(papers="gisserot2025")`. To add one, add a folder beside gisserot2025. A file study.py in it
holds studies that `biphase plan papers/NAME`, papers/NAME/small and papers/NAME/gpu name: its variables `study`,
`small` and `gpu`. material.py has the text and tasks that they share. `PRESETS` are protocols of papers on GLUE.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from biphase.errors import SpecError, nearest
from biphase.papers.glue import PRESETS
from biphase.specs.study import PAPERS, Study

if TYPE_CHECKING:
    from biphase.report.contrasts import Paper

__all__ = ["PAPERS", "PRESETS", "load", "papers_of"]


def load(name: str) -> Paper:
    """The paper of this name."""
    if name not in PAPERS:
        raise SpecError(f"there is no paper {name!r}; {nearest(name, PAPERS)}")
    return import_module(f"biphase.papers.{name}").PAPER


def papers_of(study: Study) -> tuple[Paper, ...]:
    """The papers that a study names. Their claims, and those of the study, must have different ids."""
    papers = tuple(load(name) for name in study.papers)
    ids = [statement.id for paper in papers for statement in paper.statements]
    ids += [claim.name for claim in study.claims]
    for twice in (one for one in ids if ids.count(one) > 1):
        raise SpecError(
            f"Study {study.name!r} has two claims called {twice!r}; rename one, or name fewer papers"
        )
    return papers
