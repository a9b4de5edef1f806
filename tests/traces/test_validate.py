"""The cross checks: valid runs pass whatever their shape, and each check finds what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trace_factory import TraceSpec, make_run
from tests.traces.corrupt import Rows, edit_meta, edit_request, edit_rows
from traces.reader import read_run
from traces.validate import validate_run

SHAPES = {
    "dense": {"budget": None, "dense_layers": ()},
    "fraction": {"budget": 0.4, "dense_layers": (1,), "layers": 2},
    "tight buffers": {"buffer_factor": 1.0, "turnover": 0.9, "popularity": 0.0},
    "page of one": {"page_size": 1, "budget": 16, "kv_heads": 1},
    "odd page": {"page_size": 7, "budget": 30, "sink": 3, "window": 5},
    "one at a time": {"max_running": 1, "requests": 4},
    "few frames": {"device_frames": 260, "requests": 8},
    "more than 64 steps": {"output": (70, 90), "requests": 2, "budget": 40, "prompt": (100, 200)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_runs_are_valid(tmp_path: Path, shape: str) -> None:
    make_run(tmp_path / "run", replace(TraceSpec(seed=3), **SHAPES[shape]))  # type: ignore[arg-type]
    assert validate_run(tmp_path / "run") == []
    run = read_run(tmp_path / "run")
    assert {step.mode for step in run.steps} == {"prefill", "decode"}
    assert run.meta.totals["sparse_page_hits"] > 0
    if shape == "tight buffers":
        assert run.meta.totals["sparse_page_misses"] > 100


def test_a_seed_makes_the_same_run(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, TraceSpec(seed=seed))) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert runs[0].steps == runs[1].steps
    assert runs[0].requests == runs[1].requests
    assert runs[0].steps != runs[2].steps


def _in_first(mode: str, column: str, change: Callable[[Any], Any], accept: Callable[[Rows, int], bool] = lambda rows, i: True) -> Any:
    def edit(rows: Rows) -> None:
        row = next(i for i, found in enumerate(rows["mode"]) if found == mode and accept(rows, i))
        rows[column][row] = change(rows[column][row])

    return lambda run: edit_rows(run, "steps", edit)


def _event(column: str, change: Callable[[Any], Any], kind: int = 1) -> Any:
    def edit(rows: Rows) -> None:
        row = rows["kind"].index(kind)
        rows[column][row] = change(rows[column][row])

    return lambda run: edit_rows(run, "selections", edit)


def _has_prefix(rows: Rows, row: int) -> bool:
    return any(prefix % 4 == 0 and prefix > 0 for prefix in rows["prefix_tokens"][row])


def _plus(at: int, amount: int) -> Callable[[list[int]], list[int]]:
    return lambda values: [value + amount * (i == at) for i, value in enumerate(values)]


def _drop_last_event(run: Path) -> None:
    edit_rows(run, "selections", lambda rows: [column.pop() for column in rows.values()])


CHECKS = [
    ("hits", _in_first("decode", "hits", _plus(1, 1)), {"selected.1", "totals.sparse_page_hits"}, "hits + misses + born"),
    ("selected", _in_first("decode", "selected", _plus(2, 1)), {"selected.2", "totals.sparse_pages_selected"}, "pages in selections.parquet"),
    ("demand", _in_first("decode", "demand_bytes", _plus(0, 8)), {"demand_bytes.0", "totals.sparse_link_bytes_demand"}, "misses x bytes"),
    ("prefix", _in_first("prefill", "prefix_bytes", _plus(1, -256), _has_prefix), {"prefix_bytes.1", "totals.sparse_link_bytes_prefix"}, "prefix pages"),
    ("write", _in_first("decode", "write_bytes", _plus(2, 1)), {"write_bytes.2", "totals.sparse_link_bytes_write"}, "new tokens x KV heads"),
    ("mode", _in_first("decode", "mode", lambda _: "mixed"), {"mode"}, "expected decode (from decoding), found mixed"),
    ("frames", _in_first("decode", "frames_used", lambda _: 10**9), {"frames_used"}, "expected at most 2000"),
    ("home", _in_first("decode", "home_used", lambda _: 10**9), {"home_used"}, "server.home_tokens"),
    ("missing event", _drop_last_event, {"selected.0"}, "found"),
    ("event context", _event("context", lambda v: v + 1), {"context"}, "prefix + new tokens of the step"),
    ("event step", _event("step", lambda v: 10**6), {"step", "selected.0"}, "found none with this number"),
    ("event kind", _event("kind", lambda _: 1, kind=0), {"kind", "selected.0"}, "from decoding of the step"),
    ("total", lambda run: edit_meta(run, lambda m: m["totals"].update(sparse_page_misses=1)), {"totals.sparse_page_misses"}, "the sum of misses"),
    ("dense layers", lambda run: edit_meta(run, lambda m: m["sparse"].update(dense_layers=[3])), {"sparse.dense_layers"}, "0..2"),
    ("query heads", lambda run: edit_meta(run, lambda m: m["model"].update(query_heads=3)), {"model.query_heads"}, "a multiple of kv_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "fields", "text"), [check[1:] for check in CHECKS], ids=[check[0] for check in CHECKS])
def test_a_contradiction_is_found(run_copy: Path, change: Callable[[Path], object], fields: set[str], text: str) -> None:
    change(run_copy)
    problems = validate_run(run_copy)
    assert problems
    assert {problem.field for problem in problems} <= fields
    assert any(text in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"output_tokens": 1}, "output_tokens", "decode steps"),
        ({"max_new_tokens": 1}, "output_tokens", "max_new_tokens"),
        ({"cached_tokens": 4}, "cached_tokens", "prefix of its first step"),
        ({"prompt_tokens": 10}, "prompt_tokens", "cached + prefilled in the steps"),
        ({"page_hashes": ["0" * 16] * 99}, "page_hashes", "full pages"),
        ({"status": "refused"}, "status", "it is in the steps"),
    ],
)
def test_a_request_that_contradicts_its_steps_is_found(run_copy: Path, values: dict[str, Any], field: str, text: str) -> None:
    first = read_run(run_copy).steps[0].requests[0]
    lines = (run_copy / "requests.jsonl").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f'"id":{first},' in text)
    before = next(request for request in read_run(run_copy).requests if request.id == first)
    assert (before.cached_tokens, before.output_tokens > 1, before.retractions) == (0, True, 0)
    edit_request(run_copy, line, lambda record: record.update(values))
    problems = validate_run(run_copy)
    assert any(problem.field == field and text in problem.message and f"request {first}" in problem.message for problem in problems), problems


@pytest.mark.parametrize(("overlap", "extra", "valid"), [(False, 0, True), (False, 1, False), (True, 0, True), (True, 1, True), (True, 2, False)])
def test_the_overlap_scheduler_may_run_one_step_more(run_copy: Path, overlap: bool, extra: int, valid: bool) -> None:
    edit_meta(run_copy, lambda meta: meta["server"].update(overlap=overlap))
    request = read_run(run_copy).requests[0]
    lines = [i for i, text in enumerate((run_copy / "requests.jsonl").read_text().splitlines(), 1) if f'"id":{request.id},' in text]
    edit_request(run_copy, lines[0], lambda record: record.update(output_tokens=request.output_tokens - extra, page_hashes=[]))
    assert [problem.field for problem in validate_run(run_copy)] == ([] if valid else ["output_tokens"])


def test_a_gap_in_a_requests_tokens_is_found(run_copy: Path) -> None:
    def skip(rows: Rows) -> None:
        row = max(i for i, requests in enumerate(rows["requests"]) if 0 in requests)
        rows["prefix_tokens"][row] = [prefix + 1 for prefix in rows["prefix_tokens"][row]]

    edit_rows(run_copy, "steps", skip)
    found = {problem.field: problem.message for problem in validate_run(run_copy)}
    assert "what the steps before reached" in found["prompt_tokens"]
