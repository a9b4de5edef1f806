"""The HTTP server with the flags on its command line: start-up line, answers, ``/metrics``, and a recording that the simulator repeats."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import MODEL
from tests.engine.prompts import piece

pytestmark = pytest.mark.slow


class Server:
    """``sglang serve`` as a user starts it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.trace = folder / "run"
        self.log = folder / "server.log"
        config = folder / "sparse.yaml"
        config.write_text("algorithm: quest\nbudget: 512\nsink: 32\nwindow: 64\n")
        arguments = [
            "serve", "--model-path", str(MODEL), "--dtype", "float32", "--disable-cuda-graph", "--port", str(self.port), "--sleep-on-idle",
            "--enable-metrics", "--log-level", "info", "--max-running-requests", "8", "--chunked-prefill-size", "512",
            "--sparse-config", str(config), "--sparse-budget", "256", "--sparse-host-memory", "8192", "--sparse-device-memory", "0.25GiB",
            "--sparse-buffer-factor", "2", "--sparse-trace", str(self.trace),
        ]  # fmt: skip
        command = [str(Path(sys.executable).with_name("sglang")), *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            )
        end = time.monotonic() + 600
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError("the server did not start:\n" + self.log.read_text()[-3000:])
            try:
                self.get("/health_generate")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)

    def get(self, path: str) -> str:
        """Body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """One greedy request."""
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def stop(self) -> None:
        """End the server and all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str, Path]]:
    """A server after some work, its ``/metrics`` then, and its trace; the server is killed, as servers are."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        answers = [server.generate(piece(8_000, 900), 60), server.generate(piece(8_000, 900) + piece(9_000, 100), 40), server.generate(piece(9_500, 20), 90)]
        assert [one["meta_info"]["cached_tokens"] for one in answers] == [0, 896, 0]
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.generate(piece(0, 7_990), 300)
        assert refusal.value.code == 400
        metrics = _settled(server)
        yield server, metrics, server.trace
    finally:
        server.stop()


def _settled(server: Server) -> str:
    """``/metrics`` once the idle server has brought its counters and its recording up to date."""
    end = time.monotonic() + 30
    while True:
        metrics = server.get("/metrics")
        meta = json.loads((server.trace / "meta.json").read_text())
        if meta["complete"] and value(metrics, "sparse_pages_selected_total") == meta["totals"]["sparse_pages_selected"]:
            return metrics
        assert time.monotonic() < end, f"metrics and trace do not settle: {meta['totals']}"
        time.sleep(0.5)


def value(metrics: str, name: str) -> float:
    """Sum of a series over its labels."""
    found = re.findall(rf"^sglang:{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    assert found, f"sglang:{name} is not in /metrics"
    return sum(map(float, found))


def test_the_start_up_line_says_what_is_active(served: tuple[Server, str, Path]) -> None:
    """Flags win over the file; what neither says has its default."""
    (line,) = [line for line in served[0].log.read_text().splitlines() if "sparse attention active" in line]
    for text in ("algorithm quest", "256 tokens (16 pages)", "sink 32, window 64", "page 16", "home 8192 tokens", "buffer factor 2", "frames"):
        assert text in line


def test_metrics_and_trace_totals_agree(served: tuple[Server, str, Path]) -> None:
    """Every counter of ``/metrics`` equals the trace's totals, and those equal the sums over its steps."""
    from sglang_ext.metrics import COUNTERS, GAUGES
    from traces.reader import read_run
    from traces.validate import validate_run

    _, metrics, trace = served
    assert validate_run(trace) == []
    run = read_run(trace)
    for name in COUNTERS:
        assert value(metrics, f"{name}_total") == run.meta.totals[name], name
    assert run.meta.totals["sparse_page_misses"] > 0
    assert run.meta.totals["sparse_link_bytes_prefix"] > 0
    sums = {
        "sparse_page_hits": sum(sum(step.hits) for step in run.steps),
        "sparse_link_bytes_demand": sum(sum(step.demand_bytes) for step in run.steps),
        "sparse_link_bytes_write": sum(sum(step.write_bytes) for step in run.steps),
    }
    assert {name: run.meta.totals[name] for name in sums} == sums
    gauges = {name: value(metrics, name) for name in GAUGES}
    assert gauges["sparse_frames_used"] == 0
    assert gauges["sparse_frames_free"] == run.meta.server.device_frames
    assert gauges["sparse_home_tokens_used"] + gauges["sparse_home_tokens_free"] == run.meta.server.home_tokens
    assert run.meta.model.name == MODEL.name


def test_recording_costs_under_a_tenth_of_the_step(served: tuple[Server, str, Path]) -> None:
    """By the recorder's own clock over the run, beside the time of all steps."""
    from traces.reader import read_run

    run = read_run(served[2])
    steps = sum(step.end_ns - step.start_ns for step in run.steps)
    assert 0 < run.meta.totals["sparse_recorder_ns"] < 0.1 * steps


def test_the_simulator_repeats_hits_and_bytes_exactly(served: tuple[Server, str, Path]) -> None:
    """``compare`` on the recorded run: every count of every layer of every step."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("sglang-ext")), "compare", str(served[2]), "--tolerance", "1000", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["exact"]) >= 6
    assert all(line["equal"] for line in result["exact"])
    assert result["unrecorded_selections"] == 0
