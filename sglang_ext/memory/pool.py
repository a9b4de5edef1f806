"""The KV pool that SGLang sees: logical token slots, as many as home holds; behind them home, frames and summaries."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_ext.memory.home import Home


class TwoTierPool(MHATokenToKVPool):  # type: ignore[misc]
    """``size`` logical token slots at home; the device part is opened by the runtime once the batch size is known.

    SGLang's allocator, scheduler and radix tree run on the logical slots. Only the sparse attention backend may touch the KV: the
    stock getters raise.
    """

    def _create_buffers(self) -> None:
        if self.post_capture_active:
            raise ValueError("post-capture KV sizing is not supported with sparse attention over host-resident KV")
        if self.head_dim != self.v_head_dim:
            raise ValueError(f"head_dim(={self.head_dim}) and v_head_dim(={self.v_head_dim}) must be equal for sparse attention")
        if self.store_dtype not in (torch.float32, torch.float16, torch.bfloat16):  # a checkpoint may ask for it without a flag
            raise ValueError(f"KV of type {self.dtype} is not supported with sparse attention: set --kv-cache-dtype to the model's own type")
        self.pages = (self.size + self.page_size) // self.page_size
        self.home = Home(
            self.layer_num, self.pages, self.head_num, self.page_size, self.head_dim, self.store_dtype, pin=self.device != "cpu"
        )
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        self.k_scale_buffer = self.v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs: list[Any] = []

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """K and V bytes of home; SGLang logs them."""
        half = self.home.nbytes // 2
        return half, half

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shape of one layer as SGLang would lay it out."""
        shape = torch.Size((self.size + self.page_size, self.head_num, self.head_dim))
        return shape, shape

    def _refuse(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what} of the two-tier pool was asked for: its KV lives at home, only the sparse attention backend reads it")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Raises ``RuntimeError``: there is no such buffer."""
        raise self._refuse("the key buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Raises ``RuntimeError``: there is no such buffer."""
        raise self._refuse("the value buffer")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises ``RuntimeError``: there is no such buffer."""
        raise self._refuse("the KV buffer")

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Raises ``RuntimeError``: the backend writes home itself."""
        raise self._refuse("a write")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Raises ``RuntimeError``: speculative decoding is refused at start."""
        raise self._refuse("a move")

    def get_contiguous_buf_infos(self) -> Any:
        """Raises ``RuntimeError``: disaggregation is refused at start."""
        raise self._refuse("contiguous buffers")

    def get_cpu_copy(self, indices: torch.Tensor, **kwargs: Any) -> Any:
        """Raises ``RuntimeError``: home is in host memory already; retraction recomputes."""
        raise self._refuse("a CPU copy")
