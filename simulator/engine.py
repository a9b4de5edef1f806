"""The event-driven part: arrivals, the scheduler's loop, one GPU and a link a direction, on SimPy's clock in integer nanoseconds.

With overlap scheduling the tokens of a step are processed after the next step; when nothing follows, right away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from simulator.cost import CostModel, StepCost
from simulator.gpu import Cause, Gpu
from simulator.link import Link, Transfer
from simulator.schedule import Schedule, Token
from simulator.work import StepWork
from simulator.workload import Batch
from traces.schema import RequestRecord


@dataclass(slots=True)
class RequestTimes:
    """When a request reached each point of its life; ``None`` if it never did. ``status`` is the recorded one."""

    id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    status: str = "finished"
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finish_ns: int | None = None
    cached_tokens: int = 0


class SimStep(NamedTuple):
    """One simulated step."""

    batch: Batch
    work: StepWork
    cost: StepCost
    start_ns: int
    end_ns: int


@dataclass
class SimResult:
    """What a simulation produced. ``outside``: steps whose features lie outside the range that the costs were fitted in;
    ``unrecorded``: decode rows whose selection was not recorded (they took the request's last one)."""

    steps: list[SimStep]
    requests: list[RequestTimes]
    transfers: list[Transfer]
    horizon_ns: int
    busy_ns: int
    idle_ns: dict[Cause, int]
    arrived: int
    finished: int
    refused: int
    skipped: int
    outside: int = field(init=False)
    unrecorded: int = field(init=False)

    def __post_init__(self) -> None:
        self.outside = sum(not step.cost.inside for step in self.steps)
        self.unrecorded = sum(step.work.unrecorded for step in self.steps)


class Engine:
    """One simulation.

    Args:
        requests: arrivals. Requests that never ran (refused, or aborted while they waited) are skipped and counted.
        schedule: which batch comes next.
        work_of: what a batch asks of GPU and link.
        cost: nanoseconds of it.
        overlap: whether results are processed one step late.
        seed: multiply each step by a ratio drawn from those of the fitted steps; ``None`` uses the fit itself.
        progress: called with the number of steps done.
    """

    def __init__(
        self,
        requests: Sequence[RequestRecord],
        schedule: Schedule,
        work_of: Callable[[Batch], StepWork],
        cost: CostModel,
        overlap: bool,
        seed: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.env = simpy.Environment()
        self.schedule = schedule
        self.work_of = work_of
        self.cost = cost
        self.overlap = overlap
        self.random = None if seed is None else random.Random(seed)
        self.progress = progress
        self.h2d = Link(self.env, "h2d")
        self.d2h = Link(self.env, "d2h")
        self.gpu = Gpu(self.env, self.h2d, self.d2h)
        self.steps: list[SimStep] = []
        self._requests = sorted((r for r in requests if self._counts(r)), key=lambda r: (r.arrival_ns, r.id))
        self._skipped = len(requests) - len(self._requests)
        self._times = {r.id: RequestTimes(r.id, r.arrival_ns, r.prompt_tokens, r.output_tokens, r.status) for r in self._requests}
        self._inbox: list[RequestRecord] = []
        self._to_come = len(self._requests)
        self._arrival: simpy.Event | None = None
        self._arrived = self._finished = self._last_visible = 0

    @staticmethod
    def _counts(request: RequestRecord) -> bool:
        return request.scheduled_ns is not None

    def run(self) -> SimResult:
        """Run until every request ended. Raises ``RuntimeError`` on a deadlock or if the books do not balance."""
        self.env.process(self._arrivals())
        self.env.run(until=self.env.process(self._serve()))
        horizon = int(self.env.now)
        for link in (self.h2d, self.d2h):
            link.check_drained()
        self.gpu.check(horizon)
        self.schedule.check()
        self._check_requests()
        transfers = sorted((*self.h2d.transfers, *self.d2h.transfers), key=lambda t: (t.start_ns, t.step, t.direction))
        return SimResult(
            self.steps,
            list(self._times.values()),
            transfers,
            horizon,
            self.gpu.busy_ns,
            self.gpu.idle_ns,
            self._arrived,
            self._finished,
            self.schedule.refused,
            self._skipped,
        )

    def _arrivals(self) -> Generator[simpy.Event]:
        for request in self._requests:
            if request.arrival_ns > self.env.now:
                yield self.env.timeout(request.arrival_ns - int(self.env.now))
            self._inbox.append(request)
            self._to_come -= 1
            if self._arrival is not None:
                waiting, self._arrival = self._arrival, None
                waiting.succeed()

    def _serve(self) -> Generator[simpy.Event]:
        pending: Batch | None = None
        last_end: int | None = None
        while True:
            self._receive()
            batch = self.schedule.next_batch()
            if batch is not None:
                work = self.work_of(batch)
                noise = 1.0 if self.random is None else self.cost.draw(work.features, self.random.random())
                cost = self.cost.of_step(work, noise)
                if last_end is not None:
                    yield from self.gpu.wait(max(0, last_end + cost.gap - int(self.env.now)), "scheduler")
                yield from self._step(batch, work, cost)
                last_end = int(self.env.now)
                ready, pending = (pending, batch) if self.overlap else (batch, None)
                if ready is not None:
                    self._deliver(ready)
                yield from self.gpu.wait(self.cost.decide_ns, "scheduler")
            elif pending is not None:
                ready, pending = pending, None
                self._deliver(ready)
            elif not self._to_come and not self._inbox:
                break
            else:
                yield from self._wait_for_arrival()
                last_end = None
        yield from self.gpu.wait(max(0, self._last_visible - int(self.env.now)), "scheduler")
        if self.schedule.open_requests():
            raise RuntimeError(f"deadlock: {self.schedule.open_requests()} requests are open, none can run and none will arrive")

    def _wait_for_arrival(self) -> Generator[simpy.Event]:
        begin = int(self.env.now)
        if not self._inbox:
            self._arrival = self.env.event()
            yield self._arrival
        self.gpu.idle_ns["no_work"] += int(self.env.now) - begin
        yield from self.gpu.wait(self.cost.wake_ns, "scheduler")

    def _receive(self) -> None:
        for request in self._inbox:
            self._arrived += 1
            self.schedule.arrive(request)
        self._inbox.clear()

    def _step(self, batch: Batch, work: StepWork, cost: StepCost) -> Generator[simpy.Event]:
        start = int(self.env.now)
        for row in batch.rows:
            times = self._times[row.request]
            if times.scheduled_ns is None:
                times.scheduled_ns = start
                times.cached_tokens = row.prefix
        yield from self.gpu.step(len(self.steps), work, cost)
        self.steps.append(SimStep(batch, work, cost, start, int(self.env.now)))
        if self.progress is not None:
            self.progress(len(self.steps))

    def _deliver(self, batch: Batch) -> None:
        visible = int(self.env.now) + self.cost.handoff_ns
        for token in self.schedule.deliver(batch):
            self._hand_on(token, visible)

    def _hand_on(self, token: Token, now: int) -> None:
        self._last_visible = max(self._last_visible, now)
        times = self._times[token.request]
        if token.number == 1:
            times.first_token_ns = now
        if token.last:
            times.finish_ns = now
            self._finished += 1

    def _check_requests(self) -> None:
        if self._arrived != self._finished + self.schedule.open_requests() + self.schedule.refused or self._arrived != len(self._requests):
            raise RuntimeError(
                f"requests: {len(self._requests)} sent, {self._arrived} arrived, {self._finished} finished, {self.schedule.refused} refused"
            )
        for times in self._times.values():
            points = [p for p in (times.arrival_ns, times.scheduled_ns, times.first_token_ns, times.finish_ns) if p is not None]
            if points != sorted(points):
                raise RuntimeError(f"request {times.id}: arrival, schedule, first token and finish out of order: {points}")
