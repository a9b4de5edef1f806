"""What lies between the measured steps: gaps in which the scheduler had work, waits for an arrival, and when tokens are handed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.workload import Batch, RecordedRun


class Timeline(NamedTuple):
    """``gap_ns [steps]``: from the end of the step before (0 for the first). ``busy [steps]``: that gap had work, so it is scheduler
    time. ``wake_ns``: median time from an arrival at an idle scheduler to its step. ``handoff_ns``: median time from the end of a step
    to the time at which the tokens processed after it were handed on."""

    gap_ns: npt.NDArray[np.float64]
    busy: npt.NDArray[np.bool_]
    wake_ns: int
    handoff_ns: int


def read_timeline(run: RecordedRun, batches: Sequence[Batch]) -> Timeline:
    """Timeline of a run. A gap is busy when a request of the next step had arrived before it began."""
    arrival = {request.id: request.arrival_ns for request in run.requests}
    steps = run.steps
    gaps = np.zeros(len(steps))
    busy = np.zeros(len(steps), bool)
    wakes = [steps[0].start_ns - min(arrival[row] for row in steps[0].requests)]
    for i in range(1, len(steps)):
        before = steps[i - 1].end_ns
        first = min(arrival[row] for row in steps[i].requests)
        gaps[i] = max(steps[i].start_ns - before, 0)
        busy[i] = first <= before
        if not busy[i]:
            wakes.append(steps[i].start_ns - first)
    return Timeline(gaps, busy, max(0, round(float(np.median(wakes)))), _handoff(run, batches, busy))


def _handoff(run: RecordedRun, batches: Sequence[Batch], busy: npt.NDArray[np.bool_]) -> int:
    """With overlap the tokens of a step are handed on after the next step, unless the queue drained in between."""
    first_token = {request.id: request.first_token_ns for request in run.requests}
    seen: set[int] = set()
    delays = []
    for i, batch in enumerate(batches):
        late = run.meta.server.overlap and i + 1 < len(batches) and bool(busy[i + 1])
        visible = run.steps[i + 1 if late else i].end_ns
        for row in batch.rows:
            handed = first_token.get(row.request)
            if row.yields and not row.decoding and row.request not in seen and handed is not None:
                seen.add(row.request)
                delays.append(handed - visible)
    return max(0, round(float(np.median(delays)))) if delays else 0
