"""Reads a run and refuses a damaged one, with the place.

::

    run = read_run("out/run")
    for event in run.selections():
        print(event.step, event.request, event.pages.shape)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from traces.columns import Group, groups, open_parquet
from traces.delta import Delta, DeltaDecoder, DeltaError
from traces.layout import META, SELECTIONS
from traces.load import files_of, load_meta, load_requests, load_steps
from traces.problems import Problem, Report, TraceError, refuse
from traces.schema import DECODE, SELECTION_SCHEMA, WARM, PageSets, RequestRecord, RunMeta, StepRecord

__all__ = ["Run", "SelectionEvent", "TraceError", "read_run"]


class SelectionEvent(NamedTuple):
    """What ``request`` attends at ``step``: ``pages [layers, kv_heads, S]`` int32, ascending, -1 pads; S is the longest row.

    ``context`` counts the request's tokens, the newest included; ``kind`` is ``WARM`` or ``DECODE``.
    """

    step: int
    request: int
    context: int
    kind: int
    pages: PageSets


@dataclass(frozen=True)
class Run:
    """A run that was read; selections stay on disk and are streamed.

    Attributes:
        path: its directory.
        meta: its head.
        requests: sorted by id.
        steps: in order of time.
    """

    path: Path
    meta: RunMeta
    requests: list[RequestRecord] = field(repr=False)
    steps: list[StepRecord] = field(repr=False)

    def selections(self) -> Iterator[SelectionEvent]:
        """Selection events in file order, a row group in memory at a time. Raises :class:`TraceError` at the first damaged row."""
        known = {request.id for request in self.requests} if self.meta.complete else None
        return (event for event, _ in iterate_selections(self.path, self.meta, known, refuse))


def read_run(path: str | os.PathLike[str], *, allow_incomplete: bool = False) -> Run:
    """Read the run in directory ``path``.

    Args:
        path: directory that :class:`traces.writer.TraceWriter` wrote.
        allow_incomplete: read also a run that was never closed (its server died): up to its last whole part, with a warning. Its
            steps may name requests without a record.

    Raises:
        TraceError: on anything missing, damaged or foreign, naming file, row, field and what was expected.
    """
    directory = Path(path)
    meta = load_meta(directory)
    if not meta.complete:
        if not allow_incomplete:
            message = "the run was not closed (is it being written, or did its server die?); what was written is read with allow_incomplete"
            refuse(Problem(META, None, "complete", message))
        warnings.warn(f"{directory}: the run was not closed; its last steps and the requests that were running are missing", stacklevel=2)
    requests = load_requests(directory, meta, refuse)
    known = {request.id for request in requests} if meta.complete else None
    steps = load_steps(directory, meta, known, refuse)
    for file in files_of(directory, SELECTIONS, meta):
        open_parquet(directory, file, SELECTION_SCHEMA)
    return Run(directory, meta, requests, steps)


def iterate_selections(directory: Path, meta: RunMeta, known: Collection[int] | None, report: Report) -> Iterator[tuple[SelectionEvent, Delta]]:
    """Selection events in file order, with the deltas that they came from. After a reported one, its request is left out up to a warm event.

    ``known``: ids of the requests that there are, or ``None`` when a request may lack its record.
    """
    try:
        files = files_of(directory, SELECTIONS, meta)
    except TraceError as error:
        report(error.problem)
        return
    decoder = DeltaDecoder(meta.model.layers, meta.model.kv_heads, meta.server.page_size)
    # Where each request ends, so that its pages need not be held to the end of the run. Damage is reported by the second pass.
    ends: dict[int, int] = {}
    at = 0
    for group in groups(directory, files, SELECTION_SCHEMA, ["request"], lambda _: None):
        ends.update(zip(group.columns["request"].values.tolist(), range(at, at + group.rows)))
        at += group.rows
    at = 0
    last_step: dict[int, int] = {}
    broken: set[int] = set()
    for group in groups(directory, files, SELECTION_SCHEMA, SELECTION_SCHEMA.names, report):
        heads = zip(*(group.columns[name].values.tolist() for name in ("step", "request", "context", "kind")))
        for row, (step, request, context, kind) in enumerate(heads):
            problem = _check_head(group, row, (step, request, context, kind), known, last_step.get(request, -1))
            if kind == WARM:
                broken.discard(request)
            if problem is not None:
                report(problem)
                broken.add(request)
            elif request not in broken:
                delta = _delta(group, row)
                try:
                    pages = decoder.apply(request, context, kind, delta)
                except DeltaError as error:
                    report(group.place(row, error.field, str(error)))
                    broken.add(request)
                else:
                    last_step[request] = step
                    yield SelectionEvent(step, request, context, kind, pages), delta
            if ends[request] == at + row:
                decoder.drop(request)
                last_step.pop(request, None)
        at += group.rows


def _check_head(
    group: Group, row: int, head: tuple[int, int, int, int], known: Collection[int] | None, last_step: int
) -> Problem | None:
    step, request, _, kind = head
    for name, value in zip(("step", "request", "context"), head):
        if value < 0:
            return group.place(row, name, f"expected a number >= 0, found {value}")
    if known is not None and request not in known:
        return group.place(row, "request", f"request {request} is not in requests.jsonl")
    if kind not in (WARM, DECODE):
        return group.place(row, "kind", f"expected {WARM} (warm) or {DECODE} (decode), found {kind}")
    if step <= last_step:
        return group.place(row, "step", f"expected a step after {last_step}, the last of request {request}, found {step}")
    return None


def _delta(group: Group, row: int) -> Delta:
    columns = group.columns
    return Delta(*(columns[name][row].astype(np.int32, copy=False) for name in Delta._fields))
