"""A schedule says which batch comes next; here: its interface, and the one that replays the measured batches in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from simulator.workload import Batch
from traces.schema import RequestRecord


class Token(NamedTuple):
    """Token ``number`` (from 1) of ``request`` was handed on; ``last`` ends it."""

    request: int
    number: int
    last: bool


class Schedule(Protocol):
    """What the engine asks of a schedule. Every call happens at a point of simulated time that the engine chooses."""

    refused: int

    def arrive(self, request: RequestRecord) -> None:
        """``request`` reached the scheduler."""

    def next_batch(self) -> Batch | None:
        """The batch to launch now; ``None`` if nothing can run."""

    def deliver(self, batch: Batch) -> list[Token]:
        """The results of ``batch`` are processed: tokens handed on, ended requests give back what they held."""

    def open_requests(self) -> int:
        """Requests that arrived and did not end."""

    def check(self) -> None:
        """Raise ``RuntimeError`` if the books do not balance."""


class RecordedSchedule:
    """Replays measured batches. A batch waits until its requests have arrived."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.refused = 0
        self._batches = batches
        self._next = 0
        self._arrived: dict[int, RequestRecord] = {}
        self._tokens: dict[int, int] = {}
        self._open = 0

    def arrive(self, request: RequestRecord) -> None:
        """See :class:`Schedule`."""
        self._arrived[request.id] = request
        self._open += request.output_tokens > 0

    def next_batch(self) -> Batch | None:
        """See :class:`Schedule`."""
        if self._next == len(self._batches) or any(row.request not in self._arrived for row in self._batches[self._next].rows):
            return None
        batch = self._batches[self._next]
        self._next += 1
        return batch

    def deliver(self, batch: Batch) -> list[Token]:
        """See :class:`Schedule`."""
        tokens = []
        for row in batch.rows:
            request = self._arrived[row.request]
            number = self._tokens.get(row.request, 0) + 1
            if row.yields and number <= request.output_tokens:
                self._tokens[row.request] = number
                last = number == request.output_tokens
                self._open -= last
                tokens.append(Token(row.request, number, last))
        return tokens

    def open_requests(self) -> int:
        """See :class:`Schedule`."""
        return self._open

    def check(self) -> None:
        """See :class:`Schedule`."""
        if self._next != len(self._batches):
            raise RuntimeError(f"recorded schedule: {len(self._batches) - self._next} of {len(self._batches)} batches did not run")
