"""Result files: a trace that nests, a report that loads nothing, bytes that repeat, nothing half-written."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import defaultdict

import pytest

from simulator import output
from simulator.chrome import GPU, H2D, MEASURED, SIMULATED, chrome_trace
from simulator.compare import compare
from simulator.report import render_report
from simulator.settings import parse_grid
from simulator.whatif import run_grid


@pytest.fixture(scope="module")
def result(disk_session):
    return disk_session.simulate()


@pytest.fixture(scope="module")
def trace(disk_session, result):
    return json.loads(chrome_trace(disk_session.run, result, "as recorded"))


def test_slices_nest_on_every_thread(trace):
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            threads[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    assert {(MEASURED, GPU), (SIMULATED, GPU), (SIMULATED, H2D)} <= set(threads)
    for slices in threads.values():
        stack: list[tuple[int, int]] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1][1]
            stack.append((begin, end))


def test_slices_sum_to_busy_time(trace, result, disk_session):
    def total(pid: int, names: set[str]) -> int:
        return sum(round(e["dur"] * 1000) for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["name"] in names)

    modes = {"prefill", "decode", "mixed"}
    assert total(SIMULATED, modes) == result.busy_ns + result.idle_ns["link"]
    assert total(MEASURED, modes) == sum(s.end_ns - s.start_ns for s in disk_session.run.steps)
    assert total(SIMULATED, {"demand", "prefix"}) == sum(t.end_ns - t.start_ns for t in result.transfers if t.direction == "h2d")


def test_every_asynchronous_slice_ends(trace):
    open_slices: dict[tuple[str, str], int] = defaultdict(int)
    for event in trace["traceEvents"]:
        if event["ph"] in "be":
            open_slices[event["id"], event["name"]] += 1 if event["ph"] == "b" else -1
            assert open_slices[event["id"], event["name"]] >= 0
    assert not any(open_slices.values())


def test_the_report_is_self_contained(disk_session, result):
    outcomes = run_grid(disk_session, parse_grid(["sparse.buffer_factor=1,3"]))
    recorded = disk_session.simulate(schedule="recorded")
    comparison = compare(disk_session, recorded, result)
    html = render_report(disk_session, comparison, recorded, result, outcomes).decode()
    assert not re.search(r"https?:|//[a-z]|<script|<link|url\(|@import", html)
    assert html.count("data:image/svg+xml;base64,") == 5
    assert "buffer_factor=3" in html
    assert html == render_report(disk_session, comparison, recorded, result, outcomes).decode()


def test_the_report_of_a_hostile_name_is_escaped(served):
    from simulator.session import Session

    model = served.meta.model.model_copy(update={"name": "<script>alert(1)</script>"})
    run = type(served)(served.meta.model_copy(update={"model": model}), served.requests, served.steps, served.events)
    session = Session(run)
    recorded = session.simulate(schedule="recorded")
    html = render_report(session, compare(session, recorded, None), recorded, None, run_grid(session, [()])).decode()
    assert "<script" not in html


def test_csv_lines_agree_with_the_result(result):
    steps = list(csv.DictReader(io.StringIO(output.steps_csv(result).decode())))
    assert len(steps) == len(result.steps)
    for line in steps:
        phases = sum(int(line[f"{p}_ns"]) for p in ("index", "offload", "select", "retrieve", "attend", "model", "outside", "h2d", "d2h"))
        assert int(line["end_ns"]) - int(line["start_ns"]) == phases
    links = list(csv.DictReader(io.StringIO(output.links_csv(result).decode())))
    assert sum(int(line["bytes"]) for line in links) == sum(s.work.h2d_bytes + s.work.d2h_bytes for s in result.steps)
    requests = list(csv.DictReader(io.StringIO(output.requests_csv(result).decode())))
    assert [int(line["finish_ns"]) for line in requests] == [r.finish_ns for r in result.requests]


def test_files_appear_together_or_not_at_all(tmp_path):
    class Torn(dict):
        def items(self):
            yield "a.csv", b"1"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        output.write_files(tmp_path / "out", Torn({"a.csv": b"1"}))
    assert list((tmp_path / "out").iterdir()) == []
    output.write_files(tmp_path / "out", {"a.csv": b"1", "b.csv": b"2"})
    output.write_files(tmp_path / "out", {"a.csv": b"3"})
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {"a.csv": b"3", "b.csv": b"2"}


def test_gzip_has_no_time_stamp():
    assert output.to_gzip(b"x") == output.to_gzip(b"x")
    assert gzip.decompress(output.to_gzip(b"x")) == b"x"
