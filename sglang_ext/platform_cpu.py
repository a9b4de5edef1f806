"""The CPU reference platform: stock SGLang on a machine without a GPU, by PyTorch's own operators.

It is the embedded default, the CI and the oracle of everything else: the dense ``torch_native`` backend and the sparse one both run
on it, on the same weights. It is slow and makes no claim about speed.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import psutil
import torch
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

ENTRY_POINT = "sglang_ext_cpu"


def activate() -> str | None:
    """Entry point of ``sglang.srt.platforms``: our class where nothing else can run, ``None`` elsewhere.

    SGLang asks the platform named by ``SGLANG_PLATFORM`` alone when one is named; a machine with a CUDA, ROCm or XPU device, or
    another installed platform plug-in, keeps what it has.
    """
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if any(point.name != ENTRY_POINT for point in entry_points(group="sglang.srt.platforms")):
        return None
    return "sglang_ext.platform_cpu.CpuReferencePlatform"


class CpuReferencePlatform(SRTPlatform):  # type: ignore[misc]
    """Stock SGLang on ``device="cpu"`` without its compiled CPU kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Nothing to change: the flags say what runs."""

    def get_default_attention_backend(self) -> str:
        """Stock dense attention by ``scaled_dot_product_attention``."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type[MHATokenToKVPool]:
        """The two-tier pool when the run is sparse, else the stock one."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.runtime_context import get_server_args

        if getattr(get_server_args(), "sparse_active", False):
            from sglang_ext.memory.pool import TwoTierPool

            return TwoTierPool
        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_paged_allocator_cls(self) -> type:
        """A paged allocator without Triton."""
        from sglang_ext.memory.allocator import TorchPagedAllocator

        return TorchPagedAllocator

    def get_device(self, device_id: int | None = None) -> str:
        """The one device there is."""
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of main memory."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes of main memory in use."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_dispatch_key_name(self) -> str:
        """Every multi-platform operator runs its ``forward_native``."""
        return "native"
