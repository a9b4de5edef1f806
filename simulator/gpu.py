"""One GPU: busy with a step's phases, idle for a named cause. Busy + idle = horizon, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

import simpy

from simulator.cost import STEP_PHASES, StepCost
from simulator.link import Link
from simulator.work import StepWork

Cause = Literal["scheduler", "no_work", "link"]
CAUSES: tuple[Cause, ...] = ("scheduler", "no_work", "link")

_BEFORE_WRITE = STEP_PHASES.index("offload") + 1
_BEFORE_READ = STEP_PHASES.index("retrieve") + 1


class Gpu:
    """Runs steps one after the other; its transfers overlap nothing, as on the platform that was measured."""

    def __init__(self, env: simpy.Environment, h2d: Link, d2h: Link) -> None:
        self.env = env
        self.h2d = h2d
        self.d2h = d2h
        self.busy_ns = 0
        self.idle_ns: dict[Cause, int] = dict.fromkeys(CAUSES, 0)

    def wait(self, ns: int, cause: Cause) -> Generator[simpy.Event]:
        """Idle for ``ns``."""
        self.idle_ns[cause] += ns
        if ns:
            yield self.env.timeout(ns)

    def step(self, number: int, work: StepWork, cost: StepCost) -> Generator[simpy.Event]:
        """index, write through, select, retrieve, then attend and the rest of the model."""
        yield from self._compute(sum(cost.gpu[:_BEFORE_WRITE]))
        yield from self._transfer(self.d2h, number, [("write", work.d2h_bytes)], cost.d2h)
        yield from self._compute(sum(cost.gpu[_BEFORE_WRITE:_BEFORE_READ]))
        yield from self._transfer(self.h2d, number, [("demand", int(work.demand.sum())), ("prefix", int(work.prefix.sum()))], cost.h2d)
        yield from self._compute(sum(cost.gpu[_BEFORE_READ:]))

    def _compute(self, ns: int) -> Generator[simpy.Event]:
        self.busy_ns += ns
        if ns:
            yield self.env.timeout(ns)

    def _transfer(self, link: Link, number: int, classes: list[tuple[str, int]], service_ns: int) -> Generator[simpy.Event]:
        """Move the bytes of each class; ``service_ns`` is shared by bytes, and the classes queue behind one another."""
        moving = [(kind, nbytes) for kind, nbytes in classes if nbytes]
        total = sum(nbytes for _, nbytes in moving)
        begin, left = int(self.env.now), service_ns
        events = []
        for index, (kind, nbytes) in enumerate(moving):
            share = left if index == len(moving) - 1 else service_ns * nbytes // total
            left -= share
            events.append(link.submit(number, kind, nbytes, share))
        if events:
            yield events[-1]  # first in, first out: the last one ends last
        self.idle_ns["link"] += int(self.env.now) - begin

    def check(self, horizon_ns: int) -> None:
        """Raise ``RuntimeError`` unless busy + idle = horizon."""
        idle = sum(self.idle_ns.values())
        if self.busy_ns + idle != horizon_ns:
            raise RuntimeError(f"gpu: busy {self.busy_ns} + idle {idle} ({self.idle_ns}) != horizon {horizon_ns}")
