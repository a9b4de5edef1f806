"""A table of scenarios: what a setting does to hits, bytes and times. The first line is the run as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.engine import SimResult
from simulator.metrics import Summary, simulated_summary
from simulator.session import ScheduleName, Session
from simulator.settings import Scenario, Value, scenario


@dataclass(frozen=True)
class Outcome:
    """One simulated scenario."""

    scenario: Scenario
    result: SimResult
    summary: Summary

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "label": self.scenario.label,
            "changes": dict(self.scenario.changes),
            "refused": self.result.refused,
            "skipped": self.result.skipped,
            "steps_outside_fitted_range": self.result.outside,
            "unrecorded_selections": self.result.unrecorded,
            "gpu": {"horizon_ns": self.result.horizon_ns, "busy_ns": self.result.busy_ns, "idle_ns": dict(self.result.idle_ns)},
            **self.summary.as_dict(),
        }


def run_grid(
    session: Session, grid: Sequence[tuple[tuple[str, Value], ...]], schedule: ScheduleName = "modelled", seed: int | None = None
) -> list[Outcome]:
    """Simulate the run as recorded, then every combination of ``grid`` with the same arrivals and the same noise."""
    scenarios = [scenario(session.run.meta, changes) for changes in ((), *(changes for changes in grid if changes))]
    outcomes = []
    for each in scenarios:
        result = session.simulate(each, schedule, seed)
        outcomes.append(Outcome(each, result, simulated_summary(result)))
    return outcomes
