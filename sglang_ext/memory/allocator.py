"""SGLang's paged allocator without its Triton kernels, for the CPU platform. Logical slots only: home's address follows from them."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Same slots, in the same order, as the stock allocator hands out."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots ``[extend_num_tokens]`` int64 for the new tokens of each request, or ``None`` when pages run out."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if num_new_pages > len(self.free_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        """One slot a request, ``[batch]`` int64; a new page where the new token starts one. ``None`` when pages run out."""
        starts_page = (seq_lens - 1) % self.page_size == 0
        needed = int(starts_page.sum())
        if needed > len(self.free_pages):
            return None
        out = last_loc.to(torch.int64) + 1
        out[starts_page] = self.free_pages[:needed].to(torch.int64) * self.page_size
        self.free_pages = self.free_pages[needed:]
        return out
