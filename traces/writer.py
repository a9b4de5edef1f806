"""Writes a run while it is served.

``requests.jsonl`` is appended line by line. A parquet file has its index at the end, so that one which is still open is lost with
the process: rows go to numbered parts instead, each a whole parquet file that appears under its name only when it is complete, and
``close`` joins them. A run without ``close`` keeps its parts and ``complete: false``; at most the rows since the last part are lost.
A server is often killed rather than stopped, so that ``checkpoint`` marks a run complete in its parts while nothing runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.delta import Delta, DeltaEncoder, Int32s
from traces.layout import META, REQUESTS, SELECTIONS, STEPS, parts_of
from traces.schema import DECODE, SELECTION_SCHEMA, STEP_SCHEMA, WARM, PageSets, RequestRecord, RunMeta, StepRecord

PART_ROWS = 256
"""Buffered rows that make a part; what a crash can lose."""
GROUP_ROWS = 2048
"""Rows of a row group in the joined file; what a reader holds at once."""


class _Event(NamedTuple):
    step: int
    request: int
    context: int
    kind: int
    delta: Delta


class TraceWriter:
    """Records one run into ``directory``, which is made if it does not exist.

    ``step`` and ``selection`` only buffer; parts are written by a thread. Not thread-safe: one thread calls it. As a context manager
    it abandons a run that was not closed inside the block.

    Args:
        directory: a directory that holds no run.
        meta: head of the run; ``complete`` and ``totals`` are the writer's.

    Raises:
        ValueError: if the directory holds a run already or can't be written.
    """

    def __init__(self, directory: Path, meta: RunMeta) -> None:
        self.directory = Path(directory)
        self._meta = meta.model_copy(update={"complete": False, "totals": {}})
        self._encoder = DeltaEncoder(meta.model.layers, meta.model.kv_heads, meta.server.page_size)
        self._steps: list[StepRecord] = []
        self._events: list[_Event] = []
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._parts = {STEPS: 0, SELECTIONS: 0}
        self._closed = False
        self._prepare()
        self._requests = (self.directory / REQUESTS).open("x", encoding="utf-8")
        self._write_meta()
        # The first conversion of Python lists makes pyarrow import pandas, which takes seconds: now, not in the middle of serving.
        pa.array([[0]])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trace-writer")
        self._pending: Future[None] | None = None

    def request(self, record: RequestRecord) -> None:
        """Append ``record`` and forget the request: write it after the request's last step. Raises ``ValueError`` on a known id."""
        self._begin()
        if record.id in self._ended:
            raise ValueError(f"request {record.id} was recorded already")
        self._ended.add(record.id)
        self._encoder.drop(record.id)
        self._requests.write(record.model_dump_json() + "\n")
        self._requests.flush()

    def step(self, record: StepRecord) -> None:
        """Buffer one scheduler step. The record is written as it is: the reader checks it."""
        self._begin()
        self._seen.update(record.requests)
        self._steps.append(record)
        if len(self._steps) >= PART_ROWS:
            self._hand_over()

    def selection(self, step: int, request: int, context: int, kind: int, pages: PageSets) -> None:
        """Buffer what ``request`` attends at ``step``.

        Args:
            step: number of the scheduler step.
            request: its id; its record must not have been written yet.
            context: tokens of the request, the newest included.
            kind: ``WARM`` (starts anew) or ``DECODE``.
            pages: ``[layers, kv_heads, S]`` int32, ascending inside a row, entries < 0 are padding. Not kept.

        Raises:
            ValueError: on an ended request, an unknown kind, a wrong shape, pages that do not ascend or lie beyond the context.
        """
        self._begin()
        if request in self._ended:
            raise ValueError(f"request {request} was recorded as ended before its selection of step {step}: record it after its last step")
        if kind not in (WARM, DECODE):
            raise ValueError(f"kind(={kind}) must be {WARM} (warm) or {DECODE} (decode)")
        self._seen.add(request)
        self._events.append(_Event(step, request, context, kind, self._encoder.encode(request, context, kind, pages)))
        if len(self._events) >= PART_ROWS:
            self._hand_over()

    def flush(self) -> None:
        """Write all that is buffered; on return it survives the process. Raises what the writing thread raised."""
        self._check_open()
        self._hand_over()
        self._wait()

    def checkpoint(self, totals: Mapping[str, int]) -> bool:
        """Write all that is buffered and mark the run complete as it stands, with the counters ``totals``; writing on un-marks it.

        Returns False, and leaves the run unfinished, if a request has steps or selections but no record.
        Raises what the writing thread raised.
        """
        self.flush()
        if self._seen - self._ended:
            return False
        if not self._meta.complete:
            self._mark(totals)
        return True

    def close(self, totals: Mapping[str, int]) -> None:
        """Join the parts and mark the run complete with the counters ``totals``; a second call does nothing.

        Raises:
            ValueError: if a request has steps or selections but no record; the run stays open, so that they can be written.
        """
        if self._closed:
            return
        missing = sorted(self._seen - self._ended)
        if missing:
            raise ValueError(f"requests {missing[:5]} ({len(missing)} in all) have steps but no record: write them (aborted) before close")
        self.abandon()
        for name, schema in ((STEPS, STEP_SCHEMA), (SELECTIONS, SELECTION_SCHEMA)):
            _join(parts_of(self.directory, name), self.directory / name, schema)
        self._mark(totals)
        # Only now: a crash above leaves an unfinished run with all of its parts.
        for name in (STEPS, SELECTIONS):
            shutil.rmtree(parts_of(self.directory, name))

    def abandon(self) -> None:
        """Write what is buffered and stop, without marking the run complete; a second call does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._requests.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the run {self.directory} is closed")

    def _begin(self) -> None:
        self._check_open()
        if self._meta.complete:
            self._meta = self._meta.model_copy(update={"complete": False, "totals": {}})
            self._write_meta()

    def _mark(self, totals: Mapping[str, int]) -> None:
        self._meta = self._meta.model_copy(update={"complete": True, "totals": {name: int(value) for name, value in totals.items()}})
        self._write_meta()

    def _prepare(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = (META, REQUESTS, STEPS, SELECTIONS, parts_of(Path(), STEPS).name, parts_of(Path(), SELECTIONS).name)
            held = [name for name in names if (self.directory / name).exists()]
            if held:
                raise ValueError(f"{self.directory} already holds a run ({', '.join(held)}): name another directory, or remove it")
            for name in (STEPS, SELECTIONS):
                parts_of(self.directory, name).mkdir()
        except OSError as error:
            raise ValueError(f"can't write a run into {self.directory} ({error.strerror}): name a directory that you may write") from error

    def _write_meta(self) -> None:
        path = self.directory / META
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(self._meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def _hand_over(self) -> None:
        # Both buffers together, so that the parts on disk end at about the same step.
        self._wait()
        if not self._steps and not self._events:
            return
        steps, self._steps = self._steps, []
        events, self._events = self._events, []
        self._pending = self._thread.submit(self._write_parts, steps, events)

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write_parts(self, steps: Sequence[StepRecord], events: Sequence[_Event]) -> None:
        if events:
            self._write_part(SELECTIONS, _event_table(events))
        if steps:
            self._write_part(STEPS, _step_table(steps))

    def _write_part(self, name: str, table: pa.Table) -> None:
        path = parts_of(self.directory, name) / f"{self._parts[name]:06d}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
        self._parts[name] += 1


def _step_table(steps: Sequence[StepRecord]) -> pa.Table:
    columns = [pa.array([getattr(step, field.name) for step in steps], field.type) for field in STEP_SCHEMA]
    return pa.Table.from_arrays(columns, schema=STEP_SCHEMA)


def _event_table(events: Sequence[_Event]) -> pa.Table:
    heads = [pa.array([event[i] for event in events], SELECTION_SCHEMA.field(i).type) for i in range(4)]
    lists = [_list_column([event.delta[i] for event in events]) for i in range(4)]
    return pa.Table.from_arrays(heads + lists, schema=SELECTION_SCHEMA)


def _list_column(values: Sequence[Int32s]) -> pa.ListArray:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values)))


def _join(parts: Path, target: Path, schema: pa.Schema) -> None:
    temporary = target.with_suffix(".parquet.tmp")
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        held: list[pa.Table] = []
        for part in sorted(parts.glob("*.parquet")):
            held.append(pq.read_table(part))
            if sum(table.num_rows for table in held) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(held))
                held = []
        if held:
            writer.write_table(pa.concat_tables(held))
    os.replace(temporary, target)
