"""``sglang-ext doctor``: versions, platform, GPU, link, memory, limits, and what will be refused. The text to paste into a bug report."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

PACKAGES = ("sglang-ext", "sglang", "torch", "flashinfer-python", "triton", "transformers", "numpy", "simpy", "pyarrow", "pydantic")
SGLANG = "0.5.17"


def run_doctor() -> dict[str, object]:
    """What this machine has; importing torch only where it is installed."""
    report: dict[str, object] = {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "system": {
            "os": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count() or 1,
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "memory_available_gib": _available_gib(),
            "cgroup_limit_gib": _cgroup_gib(),
            "pinned_memory_limit": _memlock(),
        },
        "gpus": _gpus(),
        "plugins": {
            group: sorted(point.name for point in entry_points(group=group))
            for group in ("sglang.srt.plugins", "sglang.srt.platforms", "sglang_ext.algorithms")
        },
    }
    report["serving"], report["refused"] = _verdict(report)
    return report


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _available_gib() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return round(int(line.split()[1]) / 2**20, 1)
    except OSError:
        pass
    return None


def _cgroup_gib() -> float | str:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return round(int(text) / 2**30, 1)
    return "none"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.1f} MiB"


def _gpus() -> list[dict[str, str]]:
    """Name, memory and link of each NVIDIA GPU as ``nvidia-smi`` tells; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    return [dict(zip(fields, (part.strip() for part in line.split(",")), strict=False)) for line in done.stdout.splitlines() if line.strip()]


def _verdict(report: dict[str, object]) -> tuple[str, list[str]]:
    """What the serving side will do here, and what it will refuse."""
    from sglang_ext.config import PAGE_SIZES

    found = _version("sglang")
    refused = [
        f"--page-size other than {', '.join(map(str, PAGE_SIZES))}",
        "MLA, sliding-window, encoder-decoder and multimodal models",
        "speculative decoding, prefill-decode disaggregation, LoRA, HiCache, HiSparse, quantised KV, pipeline and data-parallel attention",
    ]
    if found is None:
        return "none: SGLang is not installed (pip install 'sglang-ext[serve]'); simulator and traces work", refused
    if found != SGLANG:
        refused.insert(0, f"serving: this version is made for sglang {SGLANG}, found {found}")
    if report["gpus"]:
        refused.insert(0, "sparse serving on the GPU: its operators are not part of this version")
        return "dense SGLang on the GPU; simulator and traces", refused
    return "CPU reference platform: dense (torch_native) and sparse", refused


def render(report: dict[str, object]) -> str:
    """The report as text."""
    lines: list[str] = []
    for section, content in report.items():
        lines.append(f"{section}")
        if isinstance(content, dict):
            lines.extend(f"  {key}: {'not installed' if value is None else value}" for key, value in content.items())
        elif isinstance(content, list):
            lines.extend(f"  - {item}" for item in content or ["none"])
        else:
            lines.append(f"  {content}")
    return "\n".join(lines)
