"""Damage in a run, with the place: the file, the row or line, the field, and what was expected there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

LISTED = 10
"""Rows that one check names in one file before it only counts."""


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        file: path within the run.
        row: line of a ``.jsonl`` file, from 1; row of a parquet file, from 0.
        field: column or key, dotted where it is nested.
        message: what was expected, what was found.
    """

    file: str
    row: int | None
    field: str | None
    message: str

    def __str__(self) -> str:
        row = "" if self.row is None else f", {'line' if self.file.endswith('.jsonl') else 'row'} {self.row}"
        field = "" if self.field is None else f", field {self.field}"
        return f"{self.file}{row}{field}: {self.message}"


class TraceError(ValueError):
    """A run that can't be read; ``problem`` is the first finding."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


Report = Callable[[Problem], None]
"""Takes findings: :func:`refuse` stops at the first, ``list.append`` collects them."""


def refuse(problem: Problem) -> NoReturn:
    """Raise :class:`TraceError` with ``problem``."""
    raise TraceError(problem)


def report_rows(
    report: Report, file: str, field: str, bad: npt.NDArray[np.bool_], message: Callable[[int], str], first_row: int = 0
) -> npt.NDArray[np.int64]:
    """Report the rows where ``bad [N]`` holds, ``message(index)`` each, and return all of them; the last one named counts the rest."""
    rows = np.flatnonzero(bad)
    for at, index in enumerate(rows[:LISTED]):
        more = f" (and {len(rows) - LISTED} more rows)" if at == LISTED - 1 and len(rows) > LISTED else ""
        report(Problem(file, first_row + int(index), field, message(int(index)) + more))
    return rows


def of_validation(file: str, row: int | None, error: ValidationError) -> list[Problem]:
    """The findings of a pydantic ``error``, each with its place."""
    problems = []
    for detail in error.errors():
        field = ".".join(str(part) for part in detail["loc"]) or None
        found = "" if detail["type"] in ("missing", "json_invalid") else f", found {detail['input']!r:.60}"
        problems.append(Problem(file, row, field, f"{detail['msg']}{found}"))
    return problems
