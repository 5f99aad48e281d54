"""What the paper claims, what it leaves open and what a study claims itself, as tests with verdicts. No torch.

lines        which models may be compared          contrasts    one test as a record
quantities   what is measured, seed by seed        catalog      C1 to C21 and B1 to B6, by theme
measuring    contrasts with their numbers          verdicts     from numbers to verdicts
findings     all of it for one study               telling      why, in a sentence
"""

from biphase.report.claims.findings import CONTRARY, READS, Finding, Part
from biphase.report.claims.judging import judge
from biphase.report.claims.verdicts import Verdict

__all__ = ["CONTRARY", "READS", "Finding", "Part", "Verdict", "judge"]
