"""Should we still pretrain encoders with masked language modelling? All 50 models of arXiv 2507.00994.

The study of `biphase plan papers/gisserot2025` under the name of a file. See docs/paper-steps.md for how the steps
computed here compare with the paper's count.
"""

from biphase.papers.gisserot2025.study import study as study
