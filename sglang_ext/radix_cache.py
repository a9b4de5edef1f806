"""The radix cache backend ``sparse``: prefix reuse with pages at home.

SGLang's own tree already works on logical slots, and home's address of a page follows from its slot, so that inserting, splitting,
locking and evicting move nothing. What is kept by page (summaries) needs no event either: the tree holds whole pages only, a page in
the tree is never written again, and the first token that a new owner writes resets the page's summary (invariant 4). Residency is
keyed by (request, page of the request), never by home page, so that swapping a request's own pages for the tree's after prefill does
not touch its rows. What is left for this class is to hold those facts: it counts, and checks them when idle.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext

NAME = "sparse"


class SparseRadixCache(RadixCache):  # type: ignore[misc]
    """SGLang's radix tree over home pages."""

    def __init__(self, ctx: TreeCacheBuildContext) -> None:
        self.evicted_pages = 0
        super().__init__(ctx.params)

    def _delete_leaf(self, node: TreeNode) -> None:
        self.evicted_pages += len(node.value) // self.page_size
        super()._delete_leaf(node)

    def pages(self) -> torch.Tensor:
        """Home pages in the tree, ``[n]`` int64."""
        values: list[torch.Tensor] = []
        stack = [self.root_node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node is not self.root_node:
                if len(node.value) % self.page_size:
                    raise RuntimeError(f"a tree node holds {len(node.value)} tokens, not a multiple of page_size {self.page_size}")
                values.append(node.value[:: self.page_size] // self.page_size)
        return torch.cat(values).to(torch.int64) if values else torch.empty(0, dtype=torch.int64)

    def check_integrity(self, allocator: Any) -> None:
        """Raise ``RuntimeError`` unless, with no request running, every home page is free or in the tree exactly once."""
        held = self.pages()
        free = torch.cat((allocator.free_pages, allocator.release_pages)).to(torch.int64)
        everything = torch.sort(torch.cat((held, free))).values
        if not torch.equal(everything, torch.arange(1, allocator.num_pages + 1)):
            raise RuntimeError(
                f"home pages: {len(held)} in the tree + {len(free)} free, {len(torch.unique(everything))} distinct, of {allocator.num_pages}"
            )


def create_radix_cache(ctx: TreeCacheBuildContext) -> Any:
    """Factory of the backend; with ``--disable-radix-cache`` SGLang's own chunk cache."""
    if ctx.disable_radix_cache:
        return ChunkCache(ctx.params)
    return SparseRadixCache(ctx)
