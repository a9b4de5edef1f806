"""The commands as a user runs them: exit codes, one JSON object, without torch, and the same bytes again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

RUNNER = """
import sys
for name in ("torch", "sglang", "triton", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
from sglang_ext.cli import main
main()
"""


def run(*arguments: object, seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run ``sglang-ext`` in its own process, where torch and sglang can't be imported."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, arguments)], capture_output=True, text=True, env=env, cwd=root, timeout=300
    )


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_simulate_prints_a_table(run_dir):
    done = run("simulate", run_dir, "--set", "sparse.buffer_factor=1,5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "as is" in done.stdout


def test_simulate_with_json_writes_one_object(run_dir):
    done = run("simulate", run_dir, "--json", "--set", "server.max_running_requests=1")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert [s["label"] for s in result["scenarios"]] == ["as recorded", "server.max_running_requests=1"]
    assert result["fit"]["tpot_error"] is not None


def test_compare_of_a_sound_run(run_dir, tmp_path):
    done = run("compare", run_dir, "--out", tmp_path / "out", "--json", "--tolerance", "0.5")
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout)
    assert result["ok"]
    assert all(line["equal"] for line in result["exact"])
    names = {"summary.json", "requests.csv", "steps.csv", "links.csv", "trace.json.gz", "report.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ok"]


def test_compare_fails_when_a_count_differs(run_dir, tmp_path):
    """A trace whose hits were changed: exit code 1, and the place."""
    broken = Path(shutil.copytree(run_dir, tmp_path / "run"))
    parts = sorted(broken.glob("steps*.parquet")) or sorted(broken.glob("steps*/*.parquet"))
    table = pq.read_table(parts[0])
    rows = table.to_pylist()
    victim = next(row for row in rows if row["misses"][1] > 0)
    victim["hits"][1], victim["misses"][1] = victim["hits"][1] + 1, victim["misses"][1] - 1
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), parts[0])
    done = run("compare", broken, "--json", "--tolerance", "0.5")
    assert done.returncode == 1, done.stderr
    assert f"step {victim['step']} (decode), layer 1" in json.loads(done.stdout)["failures"][0]


def test_compare_fails_beyond_the_tolerance(run_dir):
    assert run("compare", run_dir, "--tolerance", "0.000001").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "nowhere"], "nowhere"),
        (["compare", "nowhere"], "nowhere"),
        (["simulate", "DIR", "--set", "sparse.bufer_factor=1"], "did you mean sparse.buffer_factor"),
        (["simulate", "DIR", "--set", "server.overlap=true", "--schedule", "recorded"], "use --schedule modelled"),
        (["simulate", "DIR", "--schedule", "guessed"], "guessed"),
        (["compare", "DIR", "--tolerance", "-1"], "tolerance"),
        (["report", "DIR"], "--out"),
    ],
)
def test_wrong_use_exits_with_2(run_dir, arguments, message):
    done = run(*(run_dir if a == "DIR" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_equal_runs_give_equal_bytes_whatever_the_hash_seed(run_dir, tmp_path):
    for name, hash_seed, seed in (("a", "0", 7), ("b", "4711", 7), ("c", "0", 8)):
        done = run("simulate", run_dir, "--out", tmp_path / name, "--seed", seed, "--set", "sparse.buffer_factor=1,2", seed=hash_seed)
        assert done.returncode == 0, done.stderr
        summary = tmp_path / name / "summary.json"
        summary.write_text(summary.read_text().replace(str(tmp_path / name), "OUT"))
    first, second, third = (digests(tmp_path / name) for name in "abc")
    assert first == second
    assert first["steps.csv"] != third["steps.csv"]


def test_report_writes_its_files(run_dir, tmp_path):
    done = run("report", run_dir, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert "buffer_factor=8" in (tmp_path / "out" / "whatif.csv").read_text()


def test_every_module_imports_without_torch():
    modules = [
        f"simulator.{path.stem}" for path in sorted((Path(__file__).parents[2] / "simulator").glob("*.py")) if path.stem != "__init__"
    ]
    script = RUNNER.split("from sglang_ext")[0] + f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    script += "loaded = [m for m in sys.modules if m.startswith(('sglang_ext', 'sparse_ops')) and not m.startswith('sglang_ext.policy')]\n"
    script += "assert loaded == ['sglang_ext'], loaded"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
