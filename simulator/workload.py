"""What the simulator reads from a run: its requests, its batches in order, and the pages each row selected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from traces.schema import PageSets, RequestRecord, RunMeta, StepRecord

Mode = Literal["prefill", "decode", "mixed"]


class Selection(Protocol):
    """One event of ``selections.parquet``."""

    @property
    def step(self) -> int: ...
    @property
    def request(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def pages(self) -> PageSets: ...


class RecordedRun(Protocol):
    """What a run offers; ``traces.reader.Run`` is one."""

    @property
    def meta(self) -> RunMeta: ...
    @property
    def requests(self) -> Sequence[RequestRecord]: ...
    @property
    def steps(self) -> Sequence[StepRecord]: ...
    def selections(self) -> Iterator[Selection]: ...


class Row(NamedTuple):
    """One request in one batch.

    Attributes:
        prefix: tokens before those of this step.
        new: tokens of this step; 1 for decode.
        yields: whether the step produces a token for the request (decode, or the last chunk of a prefill).
        epoch: how often the request was retracted before this step; results of an older epoch are dropped.
    """

    request: int
    prefix: int
    new: int
    decoding: bool
    yields: bool
    epoch: int = 0

    @property
    def context(self) -> int:
        """Tokens of the request at this step, its newest included."""
        return self.prefix + self.new


class Batch(NamedTuple):
    """What the scheduler launches in one step."""

    rows: tuple[Row, ...]
    running: int
    waiting: int
    recorded_step: int = -1
    frames_used: int = 0
    home_used: int = 0

    @property
    def mode(self) -> Mode:
        """Name of the step as the trace has it."""
        decoding = sum(row.decoding for row in self.rows)
        if decoding == len(self.rows):
            return "decode"
        return "mixed" if decoding else "prefill"


def recorded_batches(steps: Iterable[StepRecord]) -> list[Batch]:
    """The measured batches in their order.

    A prefill chunk is the last one of its request unless the request's next row prefills on from its end (it does not after a
    retraction, which starts over).
    """
    ordered = list(steps)
    goes_on: dict[int, int] = {}  # request -> where its next row begins, if that one prefills
    batches: list[Batch] = []
    for record in reversed(ordered):
        rows = []
        for request, prefix, new, decoding in zip(record.requests, record.prefix_tokens, record.new_tokens, record.decoding, strict=True):
            rows.append(Row(request, prefix, new, decoding, decoding or goes_on.get(request) != prefix + new))
            goes_on[request] = -1 if decoding else prefix
        batches.append(Batch(tuple(rows), record.running, record.waiting, record.step, record.frames_used, record.home_used))
    batches.reverse()
    return batches


def check_run(run: RecordedRun) -> None:
    """Raise ``ValueError`` if the run can't be replayed: no steps, no finished request, or a step of a request that is not listed."""
    if not run.steps:
        raise ValueError("the run has no steps: nothing to replay")
    known = {request.id for request in run.requests}
    for step in run.steps:
        missing = [request for request in step.requests if request not in known]
        if missing:
            raise ValueError(f"step {step.step} has request {missing[0]}, which requests.jsonl does not list: the run was cut off")
    if not any(request.finish_ns is not None and request.output_tokens for request in run.requests):
        raise ValueError("the run has no finished request: nothing to compare with")
