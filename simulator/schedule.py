"""A schedule says which batch comes next; here: its interface, and the one that replays the measured batches in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from simulator.workload import Batch
from traces.schema import RequestRecord


class Token(NamedTuple):
    """Token ``number`` (from 1; 0 is none, for a request that was cut off) of ``request`` was handed on; ``last`` ends it."""

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
    """Replays measured batches. A batch waits until its requests have arrived; a request ends with its last token, or its last row."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.refused = 0
        self._batches = batches
        self._next = 0
        self._arrived: dict[int, RequestRecord] = {}
        self._open: set[int] = set()
        self._tokens: Counter[int] = Counter()
        self._rows_left = Counter(row.request for batch in batches for row in batch.rows)

    def arrive(self, request: RequestRecord) -> None:
        """See :class:`Schedule`."""
        self._arrived[request.id] = request
        self._open.add(request.id)

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
            self._rows_left[row.request] -= 1
            if row.request not in self._open:
                continue  # the step that overlap wastes on an ended request
            self._tokens[row.request] += row.yields
            number = self._tokens[row.request]
            last = number == max(self._arrived[row.request].output_tokens, 1) or not self._rows_left[row.request]
            if row.yields or last:
                tokens.append(Token(row.request, number, last))
            if last:
                self._open.remove(row.request)
        return tokens

    def open_requests(self) -> int:
        """See :class:`Schedule`."""
        return len(self._open)

    def check(self) -> None:
        """See :class:`Schedule`."""
        if self._next != len(self._batches):
            raise RuntimeError(f"recorded schedule: {len(self._batches) - self._next} of {len(self._batches)} batches did not run")
