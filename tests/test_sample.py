"""The recorded sample that ships: valid, repeated exactly by the simulator, and simulated where torch and sglang are not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = sorted(path.parent for path in (Path(__file__).resolve().parents[1] / "traces" / "samples").glob("*/meta.json"))

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sglang", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed (blocked by a test)", name=name)

sys.meta_path.insert(0, Blocked())
from sglang_ext.cli import main
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``sglang-ext`` with torch, sglang and transformers out of reach."""
    return subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, check=False)


def test_there_is_a_sample() -> None:
    """The README's commands need one."""
    assert [path.name for path in SAMPLES] == ["smollm2-cpu"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_sample_is_valid_and_names_no_place(sample: Path) -> None:
    """No damage, and no path of the machine that recorded it."""
    from traces.validate import validate_run

    assert validate_run(sample) == []
    meta = (sample / "meta.json").read_text(encoding="utf-8")
    assert '"complete": true' in meta
    assert "/" not in json.loads(meta)["model"]["name"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_simulate_answers_what_if_without_torch(sample: Path) -> None:
    """More buffer, more hits, fewer bytes: two commands of the README on the base install."""
    done = run("simulate", str(sample), "--set", "sparse.buffer_factor=1,2,3,5", "--json")
    assert done.returncode == 0, done.stderr
    scenarios = [one for one in json.loads(done.stdout)["scenarios"] if one["changes"]]
    hits = [one["pages"]["hits"] for one in scenarios]
    sent = [one["pages"]["demand_bytes"] for one in scenarios]
    assert len(hits) >= 3
    assert hits == sorted(hits)
    assert sent == sorted(sent, reverse=True)
    assert hits[0] < hits[-1]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_compare_repeats_every_count(sample: Path) -> None:
    """Hits and bytes of every layer of every step equal the measured ones; times within a tenth, on the half held out and on the whole."""
    done = run("compare", str(sample), "--json")
    result = json.loads(done.stdout)
    assert all(line["equal"] for line in result["exact"])
    assert result["failures"] == []
    assert done.returncode == 0, done.stderr
