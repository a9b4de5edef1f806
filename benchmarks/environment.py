"""What machine a figure was measured on."""

from __future__ import annotations

import os
import platform
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, threads; no names of hosts or paths."""
    import torch

    from sglang_ext.doctor import run_doctor

    system = run_doctor()["system"]
    assert isinstance(system, dict)
    return {
        "processor": system["processor"],
        "cores": os.cpu_count(),
        "memory_gib": system["memory_gib"],
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
