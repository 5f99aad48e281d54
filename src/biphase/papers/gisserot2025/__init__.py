"""Gisserot-Boukhlef et al. (2025): "Should We Still Pretrain Encoders with Masked Language Modeling?"

`PAPER` is what a study tests with `papers="gisserot2025"`: the claims (claims.py), the published numbers
(published.py), the datasets and the evaluation protocol. Its runs are studies/paper.py.
"""

from biphase.catalog import TASKS
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.papers.gisserot2025.published import Numbers
from biphase.report.contrasts import Paper
from biphase.report.evidence import by_family

PAPER = Paper(
    authors="Gisserot-Boukhlef, Boizard, Faysse, Alves, Malherbe, Martins, Hudelot, Colombo",
    title="Should We Still Pretrain Encoders with Masked Language Modeling?",
    venue="arXiv:2507.00994, 2025",
    address="https://arxiv.org/abs/2507.00994",
    statements=STATEMENTS,
    published=Numbers(),
    tasks=by_family({task.name: task for task in TASKS}),
    protocol="paper",
)
