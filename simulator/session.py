"""One recorded run and everything that is worked out from it once: the fit, and the page outcomes of each buffer factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from simulator.cost import CostModel, LinkRates
from simulator.engine import Engine, SimResult
from simulator.fit import Fitted, fit_costs
from simulator.pagecache import PageOutcomes, replay_pages
from simulator.schedule import RecordedSchedule, Schedule
from simulator.scheduler import POLICIES, ModelledSchedule
from simulator.settings import Scenario
from simulator.work import WorkModel
from simulator.workload import Batch, RecordedRun, check_run, recorded_batches

ScheduleName = Literal["recorded", "modelled"]
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how far, of how many)."""


class Session:
    """Simulates scenarios of one run.

    Raises:
        ValueError: if the run can't be replayed.
    """

    def __init__(self, run: RecordedRun, progress: Progress | None = None) -> None:
        check_run(run)
        self.run = run
        self.baseline = Scenario(run.meta)
        self.batches: list[Batch] = recorded_batches(run.steps)
        self.fitted: Fitted = fit_costs(run)
        self._progress = progress
        self._outcomes: dict[float, PageOutcomes] = {}

    @property
    def can_model(self) -> bool:
        """Whether the scheduler model knows the run's scheduling policy."""
        return self.run.meta.server.schedule_policy in POLICIES

    def outcomes(self, scenario: Scenario) -> PageOutcomes:
        """Hits and misses of every recorded decode step, with the scenario's buffers."""
        factor = scenario.meta.sparse.buffer_factor
        known = self._outcomes.get(factor)
        if known is None:
            known = replay_pages(self.run, scenario.meta, self._report(f"pages, buffer factor {factor:g}"))
            self._outcomes[factor] = known
        return known

    def costs(self, rates: LinkRates) -> CostModel:
        """The fitted costs on another link."""
        fitted = self.fitted.model
        return CostModel(fitted.kinds, fitted.gaps, fitted.wake_ns, fitted.handoff_ns, rates)

    def simulate(self, scenario: Scenario | None = None, schedule: ScheduleName = "modelled", seed: int | None = None) -> SimResult:
        """Simulate ``scenario`` (default: as recorded).

        Raises:
            ValueError: if the measured batches are to be replayed under a change that alters the schedule.
        """
        scenario = scenario or self.baseline
        if schedule == "recorded" and scenario.needs_model:
            raise ValueError(f"{scenario.label}: server settings change which batches run; use --schedule modelled")
        outcomes = self.outcomes(scenario)
        work = WorkModel(scenario.meta)
        exact = schedule == "recorded"
        rules: Schedule = RecordedSchedule(self.batches) if exact else ModelledSchedule(scenario.meta)
        engine = Engine(
            self.run.requests,
            rules,
            lambda batch: work.of_batch(batch, outcomes, exact),
            self.costs(scenario.rates),
            scenario.meta.server.overlap,
            seed,
            self._report(f"{schedule} schedule, {scenario.label}"),
        )
        return engine.run()

    def _report(self, what: str) -> Callable[[int], None] | None:
        if self._progress is None:
            return None
        progress, total = self._progress, len(self.batches)
        return lambda done: progress(what, done, total)
