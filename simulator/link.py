"""One direction of the host link: a FIFO that serves one transfer at a time, in integer nanoseconds.

A copy engine knows no priorities; classes (demand, prefix, write) only say whose bytes they are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import simpy


class Transfer(NamedTuple):
    """One finished transfer."""

    step: int
    direction: str
    kind: str
    nbytes: int
    submit_ns: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Job:
    step: int
    kind: str
    nbytes: int
    service_ns: int
    submit_ns: int
    done: simpy.Event


class Link:
    """A direction of the link of one GPU."""

    def __init__(self, env: simpy.Environment, direction: str) -> None:
        self.env = env
        self.direction = direction
        self.busy_ns = 0
        self.submitted_bytes = 0
        self.transfers: list[Transfer] = []
        self._queue: deque[_Job] = deque()
        self._serving = False

    def submit(self, step: int, kind: str, nbytes: int, service_ns: int) -> simpy.Event:
        """Queue a transfer that takes ``service_ns`` once it is served; the event fires when it is done, with its sojourn as value."""
        if nbytes < 0 or service_ns < 0:
            raise ValueError(f"nbytes(={nbytes}) and service_ns(={service_ns}) must be >= 0")
        done = self.env.event()
        self.submitted_bytes += nbytes
        self._queue.append(_Job(step, kind, nbytes, service_ns, int(self.env.now), done))
        self._serve()
        return done

    def _serve(self) -> None:
        if self._serving or not self._queue:
            return
        self._serving = True
        job = self._queue.popleft()
        start = int(self.env.now)
        timeout = self.env.timeout(job.service_ns)
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _event: self._end(job, start))

    def _end(self, job: _Job, start: int) -> None:
        now = int(self.env.now)
        self.busy_ns += now - start
        self.transfers.append(Transfer(job.step, self.direction, job.kind, job.nbytes, job.submit_ns, start, now))
        self._serving = False
        job.done.succeed(now - job.submit_ns)
        self._serve()

    def check_drained(self) -> None:
        """Raise ``RuntimeError`` unless every submitted byte was delivered."""
        completed = sum(transfer.nbytes for transfer in self.transfers)
        if completed != self.submitted_bytes or self._queue or self._serving:
            raise RuntimeError(
                f"link {self.direction}: {self.submitted_bytes} bytes submitted, {completed} completed, {len(self._queue)} jobs queued"
            )
