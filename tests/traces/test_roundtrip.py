"""What is written is what is read, for any valid records."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces.writer
from tests.trace_factory import TraceSpec, make_run
from traces.delta import DeltaEncoder
from traces.reader import read_run
from traces.schema import DECODE, WARM, PageSets, RequestRecord, RunMeta, StepRecord
from traces.writer import TraceWriter

BIG = 2**31 - 1


def _trim(pages: PageSets) -> PageSets:
    """Rows packed to the left, no column of padding only."""
    rows = [[row[row >= 0] for row in layer] for layer in pages]
    width = max(len(row) for layer in rows for row in layer)
    out = np.full((*pages.shape[:2], width), -1, np.int32)
    for i, layer in enumerate(rows):
        for j, row in enumerate(layer):
            out[i, j, : len(row)] = row
    return out


@st.composite
def _pages(draw: st.DrawFn, layers: int, kv_heads: int, limit: int) -> PageSets:
    rows = [draw(st.sets(st.integers(0, limit - 1), max_size=12)) for _ in range(layers * kv_heads)]
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    out = np.full((layers * kv_heads, width), -1, np.int32)
    for row, pages in zip(out, rows):
        row[: len(pages)] = sorted(pages)
    return out.reshape(layers, kv_heads, width)


def _meta(layers: int, kv_heads: int, page_size: int) -> RunMeta:
    return TraceSpec(layers=layers, kv_heads=kv_heads, page_size=page_size, dense_layers=()).meta()


@st.composite
def _runs(draw: st.DrawFn) -> tuple[RunMeta, list[tuple[Any, ...]], list[StepRecord], list[RequestRecord]]:
    layers, kv_heads, page_size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    meta = _meta(layers, kv_heads, page_size)
    ids = draw(st.lists(st.integers(0, BIG), min_size=1, max_size=4, unique=True))
    number = st.integers(0, 2**62)
    by_layer = st.tuples(*[number] * layers)
    events, steps, now = [], [], 0
    for step in range(draw(st.integers(1, 9))):
        batch = draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
        for request in batch:
            # Contexts jump over powers of two of pages, in both directions: a bitmap must grow without losing its pages.
            context = draw(st.integers(1, 300))
            kind = draw(st.sampled_from([WARM, DECODE, DECODE, DECODE]))
            events.append((step, request, context, kind, draw(_pages(layers, kv_heads, -(-context // page_size)))))
        now += draw(st.integers(0, 5))
        per_request = st.tuples(*[st.integers(0, BIG)] * len(batch))
        values = {
            "step": step, "mode": draw(st.sampled_from(["prefill", "decode", "mixed"])), "start_ns": now, "end_ns": now + draw(st.integers(0, 9)),
            "requests": tuple(batch), "prefix_tokens": draw(per_request), "new_tokens": draw(per_request),
            "decoding": draw(st.tuples(*[st.booleans()] * len(batch))), "running": draw(st.integers(0, BIG)), "waiting": draw(st.integers(0, BIG)),
        }  # fmt: skip
        for name in StepRecord.model_fields:
            if name not in values:
                values[name] = draw(by_layer if StepRecord.model_fields[name].annotation == tuple[int, ...] else number)
        steps.append(StepRecord.model_validate(values))
    records = [draw(_requests(request)) for request in ids]
    return meta, events, steps, records


@st.composite
def _requests(draw: st.DrawFn, number: int) -> RequestRecord:
    times = sorted(draw(st.lists(st.integers(0, 2**62), min_size=4, max_size=4)))
    status = draw(st.sampled_from(["finished", "aborted", "refused"]))
    known = 4 if status == "finished" else draw(st.integers(1, 3))
    arrival, scheduled, first, finish = [time if at < known else None for at, time in enumerate(times)]
    counts = draw(st.tuples(*[st.integers(0, 2**40)] * 5))
    hashes = draw(st.lists(st.integers(0, 2**64 - 1).map(lambda value: f"{value:016x}"), max_size=3))
    return RequestRecord.model_validate(
        {
            "id": number, "arrival_ns": arrival, "scheduled_ns": scheduled, "first_token_ns": first, "finish_ns": finish,
            "prompt_tokens": counts[0], "output_tokens": counts[1], "max_new_tokens": counts[2], "cached_tokens": counts[3],
            "page_hashes": tuple(hashes), "retractions": counts[4], "status": status,
        }
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(run=_runs(), part_rows=st.integers(1, 7), group_rows=st.integers(1, 9))
def test_everything_written_is_read_back(run: tuple[Any, ...], part_rows: int, group_rows: int) -> None:
    meta, events, steps, requests = run
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(traces.writer, PART_ROWS=part_rows, GROUP_ROWS=group_rows):
        writer = TraceWriter(Path(folder) / "a" / "run", meta)
        for event in events:
            writer.selection(*event)
        for step in steps:
            writer.step(step)
        for request in requests:
            writer.request(request)
        writer.close({"sparse_page_hits": 7})
        read = read_run(writer.directory)
        found = list(read.selections())
        assert sorted(path.name for path in writer.directory.iterdir()) == ["meta.json", "requests.jsonl", "selections.parquet", "steps.parquet"]
    assert read.meta == meta.model_copy(update={"complete": True, "totals": {"sparse_page_hits": 7}})
    assert read.steps == steps
    assert read.requests == sorted(requests, key=lambda request: request.id)
    assert [tuple(event[:4]) for event in found] == [event[:4] for event in events]
    for event, (*_, pages) in zip(found, events):
        assert event.pages.dtype == np.int32
        np.testing.assert_array_equal(event.pages, _trim(pages))


def test_steps_made_without_validation_read_the_same(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    with TraceWriter(tmp_path / "again", run.meta) as writer:
        for step in run.steps:
            values: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value for name, value in dict(step).items()}
            writer.step(StepRecord.model_construct(**values))
        for request in run.requests:
            writer.request(request)
        writer.close({})
    assert len(run.steps) > 20
    assert read_run(tmp_path / "again").steps == run.steps


def test_a_request_is_forgotten_with_its_record(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    writer = TraceWriter(tmp_path / "again", run.meta)
    for event in run.selections():
        writer.selection(*event)
    held = writer._encoder
    assert len(held) == 6
    for done, request in enumerate(run.requests[:6], 1):
        writer.request(request)
        assert len(held) == 6 - done
    writer.abandon()


def test_deltas_are_small_when_little_changes() -> None:
    encoder = DeltaEncoder(2, 2, 4)
    pages = np.broadcast_to(np.arange(10, dtype=np.int32), (2, 2, 10))
    first = encoder.encode(5, 100, DECODE, pages)
    assert first.added_counts.tolist() == [10] * 4
    assert first.removed_counts.tolist() == [0] * 4
    moved = pages.copy()
    moved[1, 0] = [0, 1, 2, 3, 4, 5, 6, 7, 20, 21]
    delta = encoder.encode(5, 100, DECODE, moved)
    assert [value.tolist() for value in delta] == [[0, 0, 2, 0], [20, 21], [0, 0, 2, 0], [8, 9]]
    warm = encoder.encode(5, 100, WARM, moved)
    assert len(warm.added) == 40
    assert len(warm.removed) == 0


@pytest.mark.parametrize("kind", [WARM, DECODE])
def test_a_refused_selection_changes_nothing(kind: int) -> None:
    encoder = DeltaEncoder(1, 1, 4)
    encoder.encode(0, 40, DECODE, np.array([[[1, 2]]], np.int32))
    with pytest.raises(ValueError, match="must ascend"):
        encoder.encode(0, 4000, kind, np.array([[[500, 3]]], np.int32))
    delta = encoder.encode(0, 40, DECODE, np.array([[[2, 3]]], np.int32))
    assert (delta.added.tolist(), delta.removed.tolist()) == ([3], [1])
