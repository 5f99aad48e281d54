"""All claims that every report tests, in order: C1 to C21 of the paper, B1 to B6 beyond it."""

from __future__ import annotations

from biphase.report.claims import beyond, continued, efficiency, objectives, ratios, stages
from biphase.report.claims.contrasts import Statement


def _number(statement: Statement) -> tuple[bool, int]:
    return statement.id[0] == "B", int(statement.id[1:])


STATEMENTS: tuple[Statement, ...] = tuple(
    sorted(
        (
            *objectives.STATEMENTS,
            *ratios.STATEMENTS,
            *efficiency.STATEMENTS,
            *stages.STATEMENTS,
            *continued.STATEMENTS,
            *beyond.STATEMENTS,
        ),
        key=_number,
    )
)
