"""``sglang-ext doctor``: what it tells of a machine without a GPU, with one, and without SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext import doctor
from sglang_ext.cli import build_app


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it; returns the directory to put something there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def _nvidia_smi(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))


def test_without_a_gpu(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section is there, JSON can carry it, and the CPU reference platform is what serves."""
    _installed(monkeypatch, sglang=doctor.SGLANG)
    report = doctor.run_doctor()
    assert list(report) == ["versions", "system", "gpus", "plugins", "serving", "refused"]
    assert set(report["versions"]) == {"python", *doctor.PACKAGES}  # type: ignore[arg-type, call-overload]
    system = report["system"]
    assert isinstance(system, dict)
    assert set(system) == {"os", "processor", "cores", "memory_gib", "memory_available_gib", "cgroup_limit_gib", "pinned_memory_limit"}
    assert 0 < system["memory_available_gib"] <= system["memory_gib"]
    assert report["gpus"] == []
    assert str(report["serving"]).startswith("CPU reference platform")
    assert json.loads(json.dumps(report)) == report


def test_with_a_gpu(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a GPU with memory and link; that sparse serving is refused there comes first."""
    _installed(monkeypatch, sglang=doctor.SGLANG)
    _nvidia_smi(no_gpu, 'echo "NVIDIA H200, 143771 MiB, 570.1, 5, 16"; echo "NVIDIA H200, 143771 MiB, 570.1, 4, 8"')
    report = doctor.run_doctor()
    assert report["gpus"] == [
        {"name": "NVIDIA H200", "memory.total": "143771 MiB", "driver_version": "570.1", "pcie.link.gen.max": gen, "pcie.link.width.max": width}
        for gen, width in (("5", "16"), ("4", "8"))
    ]
    assert str(report["serving"]).startswith("dense SGLang on the GPU")
    assert isinstance(report["refused"], list)
    assert report["refused"][0].startswith("sparse serving on the GPU")


@pytest.mark.parametrize("script", ["echo 'No devices were found' >&2; exit 6", "exit 0"])
def test_a_driver_without_a_device_is_no_gpu(no_gpu: Path, script: str) -> None:
    """``nvidia-smi`` is there and fails, or lists nothing."""
    _nvidia_smi(no_gpu, script)
    assert doctor.run_doctor()["gpus"] == []


def test_without_sglang(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is served, and how to change that is said; the rest is reported all the same."""
    _installed(monkeypatch, sglang=None, torch=None)
    report = doctor.run_doctor()
    assert str(report["serving"]).startswith("none: SGLang is not installed (pip install 'sglang-ext[serve]')")
    assert "sglang  " not in doctor.render(report)
    assert "  sglang: not installed" in doctor.render(report).splitlines()


def test_another_sglang_is_named(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that the hooks are made for, and the one found."""
    _installed(monkeypatch, sglang="0.6.0")
    refused = doctor.run_doctor()["refused"]
    assert isinstance(refused, list)
    assert refused[0] == f"serving: this version is made for sglang {doctor.SGLANG}, found 0.6.0"


def test_text_has_every_key(no_gpu: Path) -> None:
    """What is pasted into a bug report lacks nothing that ``--json`` has."""
    report = doctor.run_doctor()
    text = doctor.render(report)
    for section, content in report.items():
        assert section in text.splitlines()
        for key in content if isinstance(content, dict) else ():
            assert f"  {key}: " in text
    assert "gpus\n  - none" in text


def test_the_command_writes_one_json_object(no_gpu: Path) -> None:
    """``sglang-ext doctor --json`` and the text form; exit code 0 on a machine that can't serve, too."""
    result = CliRunner().invoke(build_app(), ["doctor", "--json"])
    assert result.exit_code == 0
    assert list(json.loads(result.stdout)) == list(doctor.run_doctor())
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert result.exit_code == 0
    assert result.stdout.startswith("versions\n")
