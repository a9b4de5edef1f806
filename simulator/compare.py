"""Measured against simulated: pages and bytes must be equal, times are within a tolerance.

exact      recorded batches: hits, misses, born and bytes of every layer of every step
held-out   fitted costs on the steps that were not fitted: TPOT and time
recorded   measured batches, predicted costs: what the costs alone get wrong
modelled   everything from the arrivals: what the scheduler model adds
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulator.engine import SimResult
from simulator.fit import FitReport
from simulator.metrics import Summary, measured_summary, simulated_summary
from simulator.session import Session
from simulator.work import StepWork
from traces.schema import StepRecord

TOLERANCE = 0.10
EXACT = ("selected", "hits", "misses", "born", "demand_bytes", "prefix_bytes", "write_bytes")


@dataclass(frozen=True)
class Exact:
    """One count that must be equal. ``first``: where the first difference is."""

    name: str
    measured: int
    simulated: int
    first: str | None

    @property
    def equal(self) -> bool:
        """Equal in every layer of every step."""
        return self.first is None


@dataclass(frozen=True)
class Timing:
    """One time in nanoseconds. ``checked``: it fails the comparison when its error exceeds the tolerance."""

    scope: str
    name: str
    measured: float
    simulated: float
    checked: bool

    @property
    def error(self) -> float | None:
        """Simulated / measured - 1; ``None`` if nothing was measured."""
        return self.simulated / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class Comparison:
    """Everything that ``compare`` prints."""

    exact: tuple[Exact, ...]
    timings: tuple[Timing, ...]
    fit: FitReport
    measured: Summary
    recorded: Summary
    modelled: Summary | None
    outside: tuple[int, int | None]
    unrecorded: int
    tolerance: float

    @property
    def failures(self) -> list[str]:
        """What is not equal, or not within the tolerance."""
        failed = [
            f"{line.name}: measured {line.measured}, simulated {line.simulated}, first at {line.first}"
            for line in self.exact
            if not line.equal
        ]
        for line in self.timings:
            if line.checked and line.error is not None and abs(line.error) > self.tolerance:
                failed.append(f"{line.name} ({line.scope}): {line.error:+.1%}, tolerance {self.tolerance:.0%}")
        return failed

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "tolerance": self.tolerance,
            "exact": [{**asdict(line), "equal": line.equal} for line in self.exact],
            "timings": [{**asdict(line), "error": line.error} for line in self.timings],
            "fit": self.fit.as_dict(),
            "measured": self.measured.as_dict(),
            "recorded": self.recorded.as_dict(),
            "modelled": self.modelled.as_dict() if self.modelled else None,
            "steps_outside_fitted_range": {"recorded": self.outside[0], "modelled": self.outside[1]},
            "unrecorded_selections": self.unrecorded,
        }


def compare(session: Session, recorded: SimResult, modelled: SimResult | None, tolerance: float = TOLERANCE) -> Comparison:
    """Hold simulations of a run, by measured batches and from arrivals, against what was measured.

    ``modelled`` is ``None`` for a run whose scheduling policy the model does not know; its lines are then missing.
    """
    measured = measured_summary(session.run)
    summaries = {"recorded": simulated_summary(recorded)}
    if modelled is not None:
        summaries["modelled"] = simulated_summary(modelled)
    fit = session.fitted.report
    timings: list[Timing] = []
    for name, pair in (("tpot", fit.tpot_ns), ("makespan", fit.makespan_ns)):
        if pair is not None:
            timings.append(Timing("held-out", name, *pair, checked=True))
    for scope, summary in summaries.items():
        timings.append(Timing(scope, "tpot", measured.tpot.mean, summary.tpot.mean, True))
        timings.append(Timing(scope, "makespan", measured.makespan_ns, summary.makespan_ns, True))
        timings.append(Timing(scope, "ttft", measured.ttft.mean, summary.ttft.mean, False))
        timings.append(Timing(scope, "e2e", measured.e2e.mean, summary.e2e.mean, False))
    return Comparison(
        _exact(session.run.steps, [step.work for step in recorded.steps]),
        tuple(timings),
        fit,
        measured,
        summaries["recorded"],
        summaries.get("modelled"),
        (recorded.outside, modelled.outside if modelled else None),
        modelled.unrecorded if modelled else 0,
        tolerance,
    )


def _exact(steps: Any, works: list[StepWork]) -> tuple[Exact, ...]:
    lines = []
    for index, name in enumerate(EXACT):
        measured = simulated = 0
        first = None
        for record, work in zip(steps, works, strict=True):
            mine = work.counts[index] if index < 4 else getattr(work, name.removesuffix("_bytes"))
            theirs = np.asarray(getattr(record, name), np.int64)
            measured += int(theirs.sum())
            simulated += int(mine.sum())
            if first is None and not np.array_equal(mine, theirs):
                first = _place(record, mine, theirs)
        lines.append(Exact(name, measured, simulated, first))
    return tuple(lines)


def _place(record: StepRecord, mine: Any, theirs: Any) -> str:
    if mine.shape != theirs.shape:
        return f"step {record.step}: {len(theirs)} layers measured, {len(mine)} simulated"
    layer = int(np.flatnonzero(mine != theirs)[0])
    return f"step {record.step} ({record.mode}), layer {layer}: measured {theirs[layer]}, simulated {mine[layer]}"
