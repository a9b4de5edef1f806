"""A Chrome trace that Perfetto opens: measured and simulated steps side by side, with the same names.

One process for the measured server and one for the simulated; in each, one thread a server that does one thing at a time (GPU, h2d,
d2h), so that slices nest. Requests are asynchronous slices. Inside a measured step the phases, which were summed over layers, are
drawn one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from simulator.cost import STEP_PHASES
from simulator.engine import RequestTimes, SimResult
from simulator.fit import measured_phases
from simulator.metrics import measured_times
from simulator.workload import RecordedRun
from traces.schema import PHASES

MAX_STEPS = 20_000
"""Steps of each side that are drawn; browsers fail on much larger files."""

MEASURED, SIMULATED = 1, 2
GPU, H2D, D2H = 1, 2, 3
_THREADS = {GPU: "gpu", H2D: "h2d", D2H: "d2h"}

Event = dict[str, Any]


def chrome_trace(run: RecordedRun, result: SimResult, label: str) -> bytes:
    """The trace as JSON. ``label`` names the simulated scenario."""
    events: list[Event] = [*_names(MEASURED, "measured"), *_names(SIMULATED, f"simulated: {label}")]
    events.extend(_measured(run))
    events.extend(_simulated(result))
    events.extend(_requests(MEASURED, measured_times(run)))
    events.extend(_requests(SIMULATED, result.requests))
    other = {"steps_measured": len(run.steps), "steps_simulated": len(result.steps), "steps_drawn_at_most": MAX_STEPS}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}, separators=(",", ":")).encode()


def _us(ns: int) -> float:
    return round(ns / 1000, 3)


def _names(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, thread in _THREADS.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}


def _slice(pid: int, tid: int, name: str, start: int, end: int, args: Event | None = None) -> Event:
    event: Event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(start), "dur": _us(end - start)}
    if args:
        event["args"] = args
    return event


def _step(pid: int, mode: str, start: int, end: int, phases: Sequence[int], args: Event) -> Iterator[Event]:
    yield _slice(pid, GPU, mode, start, end, args)
    at = start
    for phase, ns in zip(STEP_PHASES, phases, strict=True):
        if ns > 0 and at + ns <= end:
            yield _slice(pid, GPU, phase, at, at + ns)
            at += ns


def _counters(pid: int, at: int, running: int, waiting: int) -> Event:
    return {"ph": "C", "pid": pid, "name": "requests", "ts": _us(at), "args": {"running": running, "waiting": waiting}}


def _measured(run: RecordedRun) -> Iterator[Event]:
    steps = run.steps[:MAX_STEPS]
    for step, phases in zip(steps, measured_phases(steps), strict=True):
        args = {"step": step.step, "rows": len(step.requests), "hits": sum(step.hits), "misses": sum(step.misses)}
        yield from _step(MEASURED, step.mode, step.start_ns, step.end_ns, [int(ns) for ns in phases], args)
        yield _counters(MEASURED, step.start_ns, step.running, step.waiting)


def _simulated(result: SimResult) -> Iterator[Event]:
    h2d_at, d2h_at = PHASES.index("retrieve"), PHASES.index("offload")
    for index, step in enumerate(result.steps[:MAX_STEPS]):
        phases = list(step.cost.gpu)
        phases[h2d_at] += step.cost.h2d
        phases[d2h_at] += step.cost.d2h
        counts = step.work.counts.sum(axis=1)
        args = {"step": index, "rows": len(step.batch.rows), "hits": int(counts[1]), "misses": int(counts[2])}
        yield from _step(SIMULATED, step.batch.mode, step.start_ns, step.end_ns, phases, args)
        yield _counters(SIMULATED, step.start_ns, step.batch.running, step.batch.waiting)
    for transfer in result.transfers:
        if transfer.step < MAX_STEPS:
            tid = H2D if transfer.direction == "h2d" else D2H
            yield _slice(
                SIMULATED, tid, transfer.kind, transfer.start_ns, transfer.end_ns, {"bytes": transfer.nbytes, "step": transfer.step}
            )


def _requests(pid: int, requests: Iterable[RequestTimes]) -> Iterator[Event]:
    for r in requests:
        if r.scheduled_ns is None or r.first_token_ns is None or r.finish_ns is None:
            continue
        common: Event = {"cat": "request", "id": f"{pid}.{r.id}", "pid": pid}
        yield {**common, "ph": "b", "name": f"request {r.id}", "ts": _us(r.arrival_ns)}
        for name, begin, end in (
            ("queued", r.arrival_ns, r.scheduled_ns),
            ("prefill", r.scheduled_ns, r.first_token_ns),
            ("decode", r.first_token_ns, r.finish_ns),
        ):
            yield {**common, "ph": "b", "name": name, "ts": _us(begin)}
            yield {**common, "ph": "e", "name": name, "ts": _us(end)}
        yield {**common, "ph": "e", "name": f"request {r.id}", "ts": _us(r.finish_ns)}
