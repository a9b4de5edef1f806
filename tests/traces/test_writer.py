"""What the writer refuses, and what survives when its process dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

import traces.writer
from tests.trace_factory import TraceSpec
from traces.reader import Run, TraceError, read_run
from traces.schema import DECODE, WARM, RequestRecord, StepRecord
from traces.validate import validate_run
from traces.writer import TraceWriter

PAGES = np.zeros((3, 2, 1), np.int32)


def _replay(writer: TraceWriter, run: Run) -> None:
    events = list(run.selections())
    for step in run.steps:
        for event in (event for event in events if event.step == step.step):
            writer.selection(*event)
        writer.step(step)
    for request in run.requests:
        writer.request(request)


def test_a_directory_with_a_run_is_refused(valid_run: Path) -> None:
    with pytest.raises(ValueError, match=r"already holds a run \(meta\.json.*name another directory"):
        TraceWriter(valid_run, TraceSpec().meta())


@pytest.mark.parametrize("left", ["requests.jsonl", "steps.parquet", "selections.parts"])
def test_leftovers_of_a_run_are_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    with pytest.raises(ValueError, match=f"already holds a run \\({left}\\)"):
        TraceWriter(tmp_path, TraceSpec().meta())
    assert [path.name for path in tmp_path.iterdir()] == [left]


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    TraceWriter(tmp_path, TraceSpec().meta()).close({})
    assert read_run(tmp_path).steps == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't write a run into .*file"):
        TraceWriter(tmp_path / "file", TraceSpec().meta())
    with pytest.raises(ValueError, match=r"can't write a run into .*run"):
        TraceWriter(tmp_path / "file" / "run", TraceSpec().meta())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="can't write a run into"):
        TraceWriter(tmp_path / "run", TraceSpec().meta())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, 4, 5, PAGES), "kind"),
        ((0, 0, 4, DECODE, PAGES[:2]), r"expected \[3, 2, S\]"),
        ((0, 0, 4, DECODE, PAGES[0]), r"expected \[3, 2, S\]"),
        ((0, 0, 4, DECODE, PAGES + 1), r"page 1 is beyond the context of 4 tokens"),
        ((0, 0, 400, DECODE, np.array([[[2, 1]] * 2] * 3)), "must ascend"),
        ((0, 0, 400, DECODE, np.array([[[2, 2]] * 2] * 3)), "without duplicates"),
        ((0, 9, 4, WARM, PAGES), "recorded as ended"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(tmp_path: Path, valid_run: Path, arguments: tuple[Any, ...], text: str) -> None:
    ended = read_run(valid_run).requests[0].model_copy(update={"id": 9})
    with TraceWriter(tmp_path / "run", TraceSpec().meta()) as writer:
        writer.request(ended)
        with pytest.raises(ValueError, match=text):
            writer.selection(*arguments)
        writer.selection(0, 1, 4, DECODE, PAGES)


def test_close_names_requests_without_a_record_and_stays_open(tmp_path: Path, valid_run: Path) -> None:
    run = read_run(valid_run)
    writer = TraceWriter(tmp_path / "run", run.meta)
    writer.step(run.steps[0])
    missing = run.steps[0].requests[0]
    with pytest.raises(ValueError, match=rf"requests \[{missing}\] \(1 in all\) have steps but no record"):
        writer.close({})
    record = next(request for request in run.requests if request.id == missing)
    writer.request(record)
    with pytest.raises(ValueError, match=f"request {missing} was recorded already"):
        writer.request(record)
    writer.close({"n": np.int64(3)})  # type: ignore[dict-item]
    writer.close({})
    assert read_run(tmp_path / "run").meta.totals == {"n": 3}
    with pytest.raises(ValueError, match="is closed"):
        writer.step(run.steps[1])
    with pytest.raises(ValueError, match="is closed"):
        writer.request(run.requests[1])
    with pytest.raises(ValueError, match="is closed"):
        writer.flush()


CRASH = """
import os, sys
from pathlib import Path
import traces.writer
from tests.traces.test_writer import _replay
from traces.reader import read_run
from traces.writer import TraceWriter
traces.writer.PART_ROWS = 10
writer = TraceWriter(Path(sys.argv[2]), read_run(sys.argv[1]).meta)
_replay(writer, read_run(sys.argv[1]))
writer._wait()
os._exit(9)
"""


def test_a_run_whose_process_died_is_read_up_to_its_last_part(valid_run: Path, tmp_path: Path) -> None:
    crashed = tmp_path / "run"
    died = subprocess.run([sys.executable, "-c", CRASH, str(valid_run), str(crashed)], check=False, cwd=Path(__file__).parents[2])
    assert died.returncode == 9
    with pytest.raises(TraceError, match=r"meta\.json, field complete: the run was not closed.*allow_incomplete"):
        read_run(crashed)
    with pytest.warns(UserWarning, match="was not closed"):
        part = read_run(crashed, allow_incomplete=True)
    whole = read_run(valid_run)
    assert not part.meta.complete
    assert part.requests == whole.requests
    assert len(whole.steps) - 10 < len(part.steps) < len(whole.steps)
    assert part.steps == whole.steps[: len(part.steps)]
    events, expected = list(part.selections()), list(whole.selections())
    assert len(expected) - 10 < len(events) < len(expected)
    for event, other in zip(events, expected):
        assert event[:4] == other[:4]
        np.testing.assert_array_equal(event.pages, other.pages)
    assert [problem.field for problem in validate_run(crashed)] == ["complete"]


def _abandoned(valid_run: Path, target: Path) -> Path:
    run = read_run(valid_run)
    with mock.patch.object(traces.writer, "PART_ROWS", 16), TraceWriter(target, run.meta) as writer:
        _replay(writer, run)
    return target


def test_leaving_the_block_without_close_keeps_everything(valid_run: Path, tmp_path: Path) -> None:
    crashed = _abandoned(valid_run, tmp_path / "run")
    with pytest.warns(UserWarning, match="was not closed"):
        assert read_run(crashed, allow_incomplete=True).steps == read_run(valid_run).steps


def test_a_torn_line_and_a_torn_part_are_left_out(valid_run: Path, tmp_path: Path) -> None:
    crashed = _abandoned(valid_run, tmp_path / "run")
    with (crashed / "requests.jsonl").open("a") as file:
        file.write('{"id": 99, "arriv')
    (crashed / "steps.parts" / "000099.tmp").write_bytes(b"PAR1")
    with pytest.warns(UserWarning, match="was not closed"), pytest.warns(UserWarning, match="line 8 is torn"):
        run = read_run(crashed, allow_incomplete=True)
    assert len(run.requests) == 7
    assert run.steps == read_run(valid_run).steps


def test_an_unfinished_run_may_lack_records_but_not_parts(valid_run: Path, tmp_path: Path) -> None:
    crashed = _abandoned(valid_run, tmp_path / "run")
    (crashed / "requests.jsonl").write_text("")
    with pytest.warns(UserWarning, match="was not closed"):
        run = read_run(crashed, allow_incomplete=True)
    assert run.requests == []
    assert sum(1 for _ in run.selections()) == sum(1 for _ in read_run(valid_run).selections()) > 0
    assert [problem.field for problem in validate_run(crashed)] == ["complete"]

    part = sorted((crashed / "steps.parts").iterdir())[1]
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="not closed"), pytest.raises(TraceError, match=rf"steps\.parts/{part.name}: not a whole parquet file"):
        read_run(crashed, allow_incomplete=True)


def test_a_crash_inside_close_leaves_a_readable_unfinished_run(valid_run: Path, tmp_path: Path) -> None:
    run = read_run(valid_run)
    writer = TraceWriter(tmp_path / "run", run.meta)
    _replay(writer, run)
    join = traces.writer._join

    def fail_second(parts: Path, target: Path, schema: Any) -> None:
        if target.name == "selections.parquet":
            raise OSError(28, "No space left on device")
        join(parts, target, schema)

    with mock.patch.object(traces.writer, "_join", fail_second), pytest.raises(OSError, match="No space left"):
        writer.close({})
    assert (tmp_path / "run" / "steps.parquet").exists()
    with pytest.warns(UserWarning, match="was not closed"):
        part = read_run(tmp_path / "run", allow_incomplete=True)
    assert part.steps == run.steps
    assert sum(1 for _ in part.selections()) == sum(1 for _ in run.selections())


def test_a_killed_server_leaves_what_it_had_at_its_last_checkpoint(valid_run: Path, tmp_path: Path) -> None:
    run = read_run(valid_run)
    half = next(i for i, step in enumerate(run.steps) if step.running + step.waiting == 0 and i > 10 and len(step.requests) == 1)
    first = {request for step in run.steps[:half] for request in step.requests}
    with mock.patch.object(traces.writer, "PART_ROWS", 16), TraceWriter(tmp_path / "run", run.meta) as writer:
        for step in run.steps[:half]:
            writer.step(step)
        assert not writer.checkpoint({"n": 1})  # requests have no record yet
        for request in run.requests:
            if request.id in first:
                writer.request(request)
        assert writer.checkpoint({"n": 2})
        assert writer.checkpoint({"n": 3})  # nothing new: nothing is written
        parts = sorted((tmp_path / "run" / "steps.parts").iterdir())
        read = read_run(tmp_path / "run")
        assert (read.steps, read.meta.totals) == (run.steps[:half], {"n": 2})
        assert len(parts) == -(-half // 16)

        rest = next(request for request in run.requests if request.id not in first)
        writer.request(rest)
        with pytest.raises(TraceError, match="was not closed"):
            read_run(tmp_path / "run")
        assert writer.checkpoint({"n": 4})
    read = read_run(tmp_path / "run")
    assert (len(read.requests), read.meta.totals) == (len(first) + 1, {"n": 4})


def test_a_checkpoint_then_close_joins_the_parts(valid_run: Path, tmp_path: Path) -> None:
    run = read_run(valid_run)
    writer = TraceWriter(tmp_path / "run", run.meta)
    _replay(writer, run)
    assert writer.checkpoint(run.meta.totals)
    assert validate_run(tmp_path / "run") == []
    assert sum(1 for _ in read_run(tmp_path / "run").selections()) == sum(1 for _ in run.selections())
    writer.close(run.meta.totals)
    assert not (tmp_path / "run" / "steps.parts").exists()
    assert validate_run(tmp_path / "run") == []


def test_what_the_thread_raises_is_raised_to_the_caller(valid_run: Path, tmp_path: Path) -> None:
    run = read_run(valid_run)
    with TraceWriter(tmp_path / "run", run.meta) as writer:
        writer.step(StepRecord.model_construct(**{**dict(run.steps[0]), "start_ns": "soon"}))
        with pytest.raises((TypeError, ValueError), match="soon"):
            writer.flush()


def test_row_groups_are_joined_in_bounded_sizes(valid_run: Path, tmp_path: Path) -> None:
    run = read_run(valid_run)
    with mock.patch.multiple(traces.writer, PART_ROWS=7, GROUP_ROWS=20):
        writer = TraceWriter(tmp_path / "run", run.meta)
        _replay(writer, run)
        writer.close(run.meta.totals)
    file = pq.ParquetFile(tmp_path / "run" / "selections.parquet")
    rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert len(rows) > 2
    assert all(20 <= count < 27 for count in rows[:-1])
    assert validate_run(tmp_path / "run") == []


def test_meta_on_disk_says_unfinished_until_close(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run", TraceSpec().meta().model_copy(update={"complete": True, "totals": {"a": 1}}))
    head = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert (head["complete"], head["totals"]) == (False, {})
    writer.close({"b": 2})
    head = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert (head["complete"], head["totals"]) == (True, {"b": 2})


def test_a_request_record_is_on_disk_at_once(tmp_path: Path, valid_run: Path) -> None:
    record = read_run(valid_run).requests[0]
    with TraceWriter(tmp_path / "run", TraceSpec().meta()) as writer:
        writer.request(record)
        assert RequestRecord.model_validate_json((tmp_path / "run" / "requests.jsonl").read_text()) == record
