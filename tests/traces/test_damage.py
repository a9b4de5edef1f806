"""Every kind of damage is refused with its place: one thing is changed in a valid run, and file, row and field must be named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sglang_ext.cli import trace_app
from tests.traces.corrupt import edit_meta, edit_request, edit_rows, edit_table, truncate
from traces.reader import TraceError, read_run
from traces.validate import validate_run

META, REQUESTS, STEPS, SELECTIONS = "meta.json", "requests.jsonl", "steps.parquet", "selections.parquet"
NAN = float("nan")


class Damage(NamedTuple):
    id: str
    change: Callable[[Path], object]
    file: str
    row: int | None
    field: str | None
    text: str


def _meta(id: str, change: Callable[[dict[str, Any]], object], field: str, text: str) -> Damage:
    return Damage(id, lambda run: edit_meta(run, change), META, None, field, text)


def _request(id: str, line: int, values: dict[str, Any], field: str, text: str) -> Damage:
    return Damage(id, lambda run: edit_request(run, line, lambda record: record.update(values)), REQUESTS, line, field, text)


def _cell(id: str, name: str, row: int, column: str, value: Callable[[Any], Any], field: str, text: str) -> Damage:
    def change(rows: dict[str, list[Any]]) -> None:
        before = rows[column][row]
        rows[column][row] = value(before)
        assert rows[column][row] != before

    return Damage(id, lambda run: edit_rows(run, name, change), f"{name}.parquet", row, field, text)


def _step(id: str, row: int, column: str, value: Callable[[Any], Any], field: str, text: str) -> Damage:
    return _cell(id, "steps", row, column, value, field, text)


def _event(id: str, row: int, column: str, value: Callable[[Any], Any], field: str, text: str) -> Damage:
    return _cell(id, "selections", row, column, value, field, text)


def _retype(name: str, column: str, to: pa.DataType) -> Callable[[Path], object]:
    return lambda run: edit_table(run, name, lambda table: table.set_column(table.column_names.index(column), column, table[column].cast(to)))


def _swap_removed(rows: dict[str, list[Any]]) -> None:
    """In row 5: remove a page that no row of the request ever had."""
    rows["removed_counts"][5] = [1, 0, 0, 0, 0, 0]
    rows["removed"][5] = [400]


def _add_present(rows: dict[str, list[Any]]) -> None:
    """In the first decode row: add page 0 of layer 0, which the warm event added."""
    row = rows["kind"].index(1)
    assert row == 2
    rows["added_counts"][row][0] += 1
    rows["added"][row] = [0, *rows["added"][row]]


def _grow_added(page: int) -> Callable[[dict[str, list[Any]]], None]:
    def change(rows: dict[str, list[Any]]) -> None:
        rows["added_counts"][3][-1] += 1
        rows["added"][3] = [*rows["added"][3], page]

    return change


def _warm_removes(rows: dict[str, list[Any]]) -> None:
    assert rows["kind"][0] == 0
    rows["removed_counts"][0][0] += 1
    rows["removed"][0] = [0]


def _unsorted(rows: dict[str, list[Any]]) -> None:
    rows["added"][0][0], rows["added"][0][1] = rows["added"][0][1], rows["added"][0][0]


def _meta_becomes_a_directory(run: Path) -> None:
    (run / META).unlink()
    (run / META).mkdir()


def _duplicate_id(run: Path) -> None:
    first = json.loads((run / REQUESTS).read_text().splitlines()[0])["id"]
    edit_request(run, 3, lambda record: record.update(id=first))


DAMAGES = [
    Damage("meta missing", lambda run: (run / META).unlink(), META, None, None, "can't be read"),
    Damage("meta is a directory", _meta_becomes_a_directory, META, None, None, "can't be read"),
    Damage("meta not json", lambda run: truncate(run / META, 0.5), META, None, None, "not JSON"),
    Damage("meta nested too deep", lambda run: (run / META).write_text("[" * 100_000), META, None, None, "not JSON"),
    Damage("meta not utf-8", lambda run: (run / META).write_bytes(b'{"a": "\xff\xfe"}'), META, None, None, "not JSON"),
    Damage("meta is a list", lambda run: (run / META).write_text("[]"), META, None, None, "expected an object"),
    _meta("version newer", lambda m: m.update(schema_version=2), "schema_version", "expected 1, found 2"),
    _meta("version text", lambda m: m.update(schema_version="1"), "schema_version", "expected 1, found '1'"),
    _meta("version true", lambda m: m.update(schema_version=True), "schema_version", "expected 1, found True"),
    _meta("version absent", lambda m: m.pop("schema_version"), "schema_version", "expected 1, found None"),
    _meta("unknown key", lambda m: m.update(colour=1), "colour", "Extra inputs are not permitted"),
    _meta("missing key", lambda m: m["server"].pop("page_size"), "server.page_size", "Field required"),
    _meta("text for a number", lambda m: m["model"].update(layers="3"), "model.layers", "valid integer"),
    _meta("zero layers", lambda m: m["model"].update(layers=0), "model.layers", "greater than 0"),
    _meta("nan", lambda m: m["sparse"].update(buffer_factor=NAN), "sparse.buffer_factor", "finite"),
    _meta("nan hardware", lambda m: m["hardware"].update(link=NAN), "hardware.link", "finite"),
    _meta("negative factor", lambda m: m["sparse"].update(buffer_factor=-1.0), "sparse.buffer_factor", ">= 0"),
    _meta("negative total", lambda m: m["totals"].update(sparse_page_hits=-3), "totals.sparse_page_hits", ">= 0"),
    _meta("not closed", lambda m: m.update(complete=False), "complete", "was not closed"),
    Damage("requests missing", lambda run: (run / REQUESTS).unlink(), REQUESTS, None, None, "can't be read"),
    Damage("requests cut", lambda run: (run / REQUESTS).write_text((run / REQUESTS).read_text()[:-1]), REQUESTS, 7, None, "does not end"),
    Damage("requests not json", lambda run: (run / REQUESTS).write_text('{"id": 1\n'), REQUESTS, 1, None, "Invalid JSON"),
    Damage("requests blank line", lambda run: (run / REQUESTS).write_text("\n" + (run / REQUESTS).read_text()), REQUESTS, 1, None, "Invalid JSON"),
    Damage("duplicate id", _duplicate_id, REQUESTS, 3, "id", "is in line 1 already"),
    _request("negative", 2, {"prompt_tokens": -5}, "prompt_tokens", "greater than or equal to 0, found -5"),
    _request("nan", 2, {"prompt_tokens": NAN}, "prompt_tokens", "found nan"),
    _request("fraction", 2, {"arrival_ns": 1.5}, "arrival_ns", "valid integer, found 1.5"),
    _request("text", 2, {"arrival_ns": "12"}, "arrival_ns", "valid integer, found '12'"),
    _request("null", 2, {"arrival_ns": None}, "arrival_ns", "valid integer, found None"),
    _request("foreign key", 4, {"text": "hello"}, "text", "Extra inputs are not permitted"),
    _request("unknown status", 4, {"status": "fine"}, "status", "'finished', 'aborted' or 'refused', found 'fine'"),
    _request("first token before arrival", 2, {"arrival_ns": 10**15}, "scheduled_ns", ">= arrival_ns"),
    _request("first token before its step", 2, {"first_token_ns": 0}, "first_token_ns", ">= scheduled_ns"),
    _request("finish before first token", 2, {"finish_ns": 1}, "finish_ns", ">= first_token_ns"),
    _request("finished without a finish", 2, {"finish_ns": None}, "finish_ns", "expected a time for a finished request"),
    _request("hash not hex", 2, {"page_hashes": ["0" * 16, "xyz"]}, "page_hashes.1", "16 hex digits, found 'xyz'"),
    Damage("steps missing", lambda run: (run / STEPS).unlink(), STEPS, None, None, "missing"),
    Damage("steps truncated", lambda run: truncate(run / STEPS, 0.7), STEPS, None, None, "not a whole parquet file"),
    Damage("steps empty", lambda run: (run / STEPS).write_bytes(b""), STEPS, None, None, "not a whole parquet file"),
    Damage("steps foreign", lambda run: shutil.copy(run / SELECTIONS, run / STEPS), STEPS, None, "request", "unknown column"),
    Damage("column missing", lambda run: edit_table(run, "steps", lambda t: t.drop_columns(["hits"])), STEPS, None, "hits", "found none"),
    Damage("column twice", lambda run: edit_table(run, "steps", lambda t: t.append_column("hits", t["hits"])), STEPS, None, "hits", "found 2"),
    Damage("column of floats", _retype("steps", "start_ns", pa.float64()), STEPS, None, "start_ns", "expected type int64, found double"),
    Damage("list of wide numbers", _retype("steps", "requests", pa.list_(pa.int64())), STEPS, None, "requests", "found list"),
    _step("null", 4, "running", lambda _: None, "running", "found null"),
    _step("null list", 4, "hits", lambda _: None, "hits", "found null"),
    _step("null in a list", 4, "hits", lambda v: [*v[:-1], None], "hits", "found null"),
    _step("negative", 6, "forward_ns", lambda _: -1, "forward_ns", ">= 0, found -1"),
    _step("negative in a list", 6, "misses", lambda v: [*v[:-1], -2], "misses", ">= 0, found -2"),
    _step("unknown mode", 2, "mode", lambda _: "idle", "mode", "found 'idle'"),
    _step("end before start", 3, "end_ns", lambda _: 0, "end_ns", ">= start_ns"),
    _step("start before the previous", 5, "start_ns", lambda _: 1, "start_ns", "that of the step before"),
    _step("step number twice", 5, "step", lambda v: v - 1, "step", "> that of the step before"),
    _step("layers too few", 7, "hits", lambda v: v[:-1], "hits", "expected 3 entries (one a layer), found 2"),
    _step("layers too many", 7, "write_bytes", lambda v: [*v, 0], "write_bytes", "expected 3 entries (one a layer), found 4"),
    _step("batch too short", 7, "new_tokens", lambda _: [], "new_tokens", "entries (one a request), found 0"),
    _step("unknown request", 8, "requests", lambda v: [*v[:-1], 77], "requests", "found [77]"),
    Damage("selections missing", lambda run: (run / SELECTIONS).unlink(), SELECTIONS, None, None, "missing"),
    Damage("selections truncated", lambda run: truncate(run / SELECTIONS, 0.5), SELECTIONS, None, None, "not a whole parquet file"),
    Damage("selections retyped", _retype("selections", "kind", pa.int32()), SELECTIONS, None, "kind", "expected type int8, found int32"),
    _event("event of an unknown request", 2, "request", lambda _: 99, "request", "request 99 is not in"),
    _event("negative request", 2, "request", lambda _: -1, "request", ">= 0"),
    _event("negative context", 2, "context", lambda _: -1, "context", ">= 0"),
    _event("unknown kind", 2, "kind", lambda _: 7, "kind", "found 7"),
    _event("step goes back", 2, "step", lambda _: 0, "step", "expected a step after"),
    _event("rows missing", 3, "added_counts", lambda v: v[:-1], "added_counts", "expected 6 entries"),
    _event("negative count", 3, "added_counts", lambda v: [-1, *v[1:]], "added_counts", ">= 0, found -1"),
    _event("counts do not add up", 3, "removed", lambda v: [*v, 1], "removed", "the sum of removed_counts"),
    _event("page beyond the context", 0, "context", lambda _: 4, "added", "beyond the context (1 pages)"),
    Damage("removes an absent page", lambda run: edit_rows(run, "selections", _swap_removed), SELECTIONS, 5, "removed", "page 400 of layer 0, KV head 0"),
    Damage("adds a present page", lambda run: edit_rows(run, "selections", _add_present), SELECTIONS, 2, "added", "attended already"),
    Damage("adds a far page", lambda run: edit_rows(run, "selections", _grow_added(10**6)), SELECTIONS, 3, "added", "page 1000000 is beyond"),
    Damage("adds page -2", lambda run: edit_rows(run, "selections", _grow_added(-2)), SELECTIONS, 3, "added", ">= 0, found -2"),
    Damage("warm removes", lambda run: edit_rows(run, "selections", _warm_removes), SELECTIONS, 0, "removed", "a warm event"),
    Damage("pages do not ascend", lambda run: edit_rows(run, "selections", _unsorted), SELECTIONS, 0, "added", "ascending"),
]  # fmt: skip


def _consume(run: Path) -> None:
    for _ in read_run(run).selections():
        pass


def test_the_undamaged_run_is_read(valid_run: Path) -> None:
    _consume(valid_run)
    assert validate_run(valid_run) == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.id)
def test_damage_is_refused_with_its_place(run_copy: Path, damage: Damage) -> None:
    damage.change(run_copy)
    with pytest.raises(TraceError) as caught:
        _consume(run_copy)
    problem = caught.value.problem
    assert (problem.file, problem.row, problem.field) == (damage.file, damage.row, damage.field)
    message = str(caught.value)
    assert damage.text in message
    assert damage.file in message
    if damage.row is not None:
        assert f"{'line' if damage.file == REQUESTS else 'row'} {damage.row}" in message
    if damage.field is not None:
        assert f"field {damage.field}" in message

    # The validator finds it too, and the command line refuses without a traceback.
    assert problem in [found for found in validate_run(run_copy) if found.field != "complete"] or damage.field == "complete"
    info = CliRunner().invoke(trace_app(), ["info", str(run_copy), "--json"])
    assert info.exit_code == 2
    assert json.loads(info.stdout) == {"error": message}
    assert info.stderr == f"error: {message}\n"
    assert CliRunner().invoke(trace_app(), ["validate", str(run_copy)]).exit_code == 1


def test_a_corrupt_page_inside_a_parquet_file_is_refused(run_copy: Path) -> None:
    path = run_copy / STEPS
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"steps\.parquet: row group 0 is damaged"):
        read_run(run_copy)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n')
    with pytest.raises(TraceError, match=r"meta\.json: expected a run directory"):
        read_run(tmp_path)
    with pytest.raises(TraceError, match="expected a directory that holds a run"):
        read_run(tmp_path / "trace.jsonl")
    with pytest.raises(TraceError, match="expected a directory that holds a run"):
        read_run(tmp_path / "nothing")


def test_many_bad_rows_are_counted_not_listed(run_copy: Path) -> None:
    edit_rows(run_copy, "steps", lambda rows: rows.update(hits=[[0]] * len(rows["hits"])))
    steps = len(pq.read_table(run_copy / STEPS))
    found = [problem for problem in validate_run(run_copy) if problem.file == STEPS]
    assert [problem.row for problem in found] == list(range(10))
    assert found[-1].message.endswith(f"(and {steps - 10} more rows)")


def test_after_damage_a_request_is_taken_up_at_its_next_warm_event(run_copy: Path) -> None:
    edit_rows(run_copy, "selections", _add_present)
    request = pq.read_table(run_copy / SELECTIONS)["request"][2].as_py()
    found = validate_run(run_copy)
    # One finding, not one for each of the request's later rows.
    assert [(problem.file, problem.row) for problem in found] == [(SELECTIONS, 2)]
    assert pq.read_table(run_copy / SELECTIONS)["request"].to_pylist().count(request) > 5
