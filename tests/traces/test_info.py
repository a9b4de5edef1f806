"""The summary, against numbers counted here from the records, and the commands around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_ext import __version__
from sglang_ext.cli import build_app, trace_app
from tests.traces.corrupt import edit_meta
from traces.info import describe
from traces.reader import read_run
from traces.schema import DECODE, WARM
from traces.writer import TraceWriter


def test_the_summary_counts_what_the_records_say(valid_run: Path) -> None:
    run = read_run(valid_run)
    found = describe(run)
    finished = [request for request in run.requests if request.status == "finished"]
    assert found["requests"] == {"total": 7, "finished": 6, "aborted": 0, "refused": 1, "retractions": 0}
    assert found["tokens"]["output"] == sum(request.output_tokens for request in finished)
    assert found["tokens"]["prompt"] == sum(request.prompt_tokens for request in finished)
    assert found["tokens"]["cached"] > 0
    assert found["duration_s"] == run.steps[-1].end_ns / 1e9
    ttft = [(request.first_token_ns or 0) - request.arrival_ns for request in finished]
    assert found["ttft_ms"]["p50"] == pytest.approx(np.median(ttft) / 1e6)
    assert found["ttft_ms"]["p50"] < found["ttft_ms"]["p99"] <= max(ttft) / 1e6
    longer = [request for request in finished if request.output_tokens > 1]
    assert len(longer) < len(finished)
    tpot = [((r.finish_ns or 0) - (r.first_token_ns or 0)) / (r.output_tokens - 1) for r in longer]
    assert found["tpot_ms"]["p50"] == pytest.approx(np.median(tpot) / 1e6)
    hits, misses = run.meta.totals["sparse_page_hits"], run.meta.totals["sparse_page_misses"]
    assert misses > 0
    assert found["hit_rate"] == hits / (hits + misses)
    assert found["hit_rate_by_layer"][0] == 1.0  # dense: every page has a frame
    assert all(rate < 1.0 for rate in found["hit_rate_by_layer"][1:])
    assert found["link_bytes"] == {kind: run.meta.totals[f"sparse_link_bytes_{kind}"] for kind in ("demand", "prefix", "write")}
    assert found["steps"]["prefill"] + found["steps"]["decode"] == found["steps"]["total"] == len(run.steps)


def test_reuse_is_the_share_that_the_event_before_had(valid_run: Path) -> None:
    run = read_run(valid_run)
    before: dict[int, set[tuple[int, int, int]]] = {}
    reused = total = 0
    for event in run.selections():
        pages = {(i, j, int(page)) for i, layer in enumerate(event.pages) for j, row in enumerate(layer) for page in row if page >= 0}
        if event.kind == DECODE:
            reused += len(pages & before[event.request])
            total += len(pages)
        before[event.request] = pages
    found = describe(run)["selections"]
    assert 0.5 < found["reused_from_previous"] < 1
    assert found["reused_from_previous"] == reused / total
    assert found["events"] == sum(1 for _ in run.selections())
    assert found["bytes_per_event"] == (valid_run / "selections.parquet").stat().st_size / found["events"]


def test_a_run_without_steps_has_no_shares(tmp_path: Path, valid_run: Path) -> None:
    TraceWriter(tmp_path / "run", read_run(valid_run).meta).close({})
    found = describe(read_run(tmp_path / "run"))
    assert (found["hit_rate"], found["ttft_ms"], found["selections"]["bytes_per_event"]) == (None, None, None)
    assert found["hit_rate_by_layer"] == [None] * 3


def test_info_writes_one_json_object(valid_run: Path) -> None:
    result = CliRunner().invoke(trace_app(), ["info", str(valid_run), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(describe(read_run(valid_run))))
    assert result.stderr == ""


def test_info_for_people_names_the_numbers(valid_run: Path) -> None:
    result = CliRunner().invoke(trace_app(), ["info", str(valid_run)])
    assert result.exit_code == 0
    for word in ("hit_rate", "ttft_ms", "link_bytes", "layer"):
        assert word in result.stdout


def test_validate_prints_problems_and_exits_1(run_copy: Path) -> None:
    good = CliRunner().invoke(trace_app(), ["validate", str(run_copy)])
    assert (good.exit_code, good.stdout) == (0, "valid\n")
    edit_meta(run_copy, lambda meta: meta["totals"].update(sparse_page_hits=1))
    bad = CliRunner().invoke(trace_app(), ["validate", str(run_copy), "--json"])
    assert bad.exit_code == 1
    found = json.loads(bad.stdout)
    assert not found["valid"]
    assert [problem["field"] for problem in found["problems"]] == ["totals.sparse_page_hits"]
    human = CliRunner().invoke(trace_app(), ["validate", str(run_copy)])
    assert human.exit_code == 1
    assert "meta.json, field totals.sparse_page_hits: expected" in human.stdout


@pytest.mark.parametrize("command", ["info", "validate"])
def test_wrong_use_exits_2(tmp_path: Path, command: str) -> None:
    missing = CliRunner().invoke(trace_app(), [command, str(tmp_path / "none"), "--json"])
    assert missing.exit_code == 2
    assert "none" in json.loads(missing.stdout)["error"]
    assert missing.stderr.startswith("error: ")
    assert CliRunner().invoke(trace_app(), [command]).exit_code == 2
    assert CliRunner().invoke(trace_app(), [command, "a", "--nonsense"]).exit_code == 2


def test_an_unfinished_run_needs_the_flag(tmp_path: Path, valid_run: Path) -> None:
    with TraceWriter(tmp_path / "run", read_run(valid_run).meta) as writer:
        writer.selection(0, 1, 4, WARM, np.zeros((3, 2, 1), np.int32))
    refused = CliRunner().invoke(trace_app(), ["info", str(tmp_path / "run")])
    assert refused.exit_code == 2
    assert "was not closed" in refused.stderr
    with pytest.warns(UserWarning, match="was not closed"):
        read = CliRunner().invoke(trace_app(), ["info", str(tmp_path / "run"), "--allow-incomplete", "--json"])
    assert read.exit_code == 0
    assert json.loads(read.stdout)["selections"]["events"] == 1


def test_the_whole_application_is_light_and_knows_its_version() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"sglang-ext {__version__}\n")
    code = "import sys, sglang_ext.cli as c; c.build_app(); print([m for m in ('torch', 'sglang', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout == "[]\n"
