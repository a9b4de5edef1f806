"""The host tier as the scheduler counts it: logical pages that are free, private to a request, or in the radix tree.

    free + private + cached = total           cached = locked (a live request holds them) + evictable

The tree is kept page by page: a page's hash is chained over the pages before it, so equal hash means equal prefix. Eviction takes
the least recently used leaf; SGLang evicts whole nodes, so it may free a few pages more at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Page:
    parent: str | None
    children: int = 0
    locks: int = 0
    used: int = 0


@dataclass(slots=True)
class Holding:
    """What one request holds: ``locked`` leading pages in the tree, ``private`` pages after them."""

    hashes: Sequence[str]
    locked: int = 0
    private: int = 0


class Home:
    """Pages of the host tier.

    Args:
        pages: logical pages.
        reuse: whether finished and chunked pages enter the tree.
    """

    def __init__(self, pages: int, reuse: bool = True) -> None:
        self.pages = pages
        self.reuse = reuse
        self.free = pages
        self.evictable = 0
        self.private = 0
        self.evicted = 0
        self._tree: dict[str, _Page] = {}
        self._leaves: list[tuple[int, str]] = []
        self._clock = 0

    @property
    def used(self) -> int:
        """Pages in use or cached."""
        return self.pages - self.free

    def match(self, hashes: Sequence[str], limit: int) -> int:
        """Leading pages of ``hashes`` that the tree holds, at most ``limit``; they become the most recently used."""
        if not self.reuse:
            return 0
        self._clock += 1
        found = 0
        for page_hash in hashes[:limit]:
            page = self._tree.get(page_hash)
            if page is None:
                break
            page.used = self._clock
            found += 1
        return found

    def lock(self, holding: Holding, pages: int) -> None:
        """Hold the first ``pages`` pages of ``holding``, which the tree has."""
        for page_hash in holding.hashes[holding.locked : pages]:
            page = self._tree[page_hash]
            self.evictable -= page.locks == 0
            page.locks += 1
        holding.locked = pages

    def unlock(self, holding: Holding) -> None:
        """Let go of every page in the tree."""
        for page_hash in reversed(holding.hashes[: holding.locked]):
            page = self._tree[page_hash]
            page.locks -= 1
            if page.locks == 0:
                self.evictable += 1
                self._offer(page_hash, page)
        holding.locked = 0

    def allocate(self, holding: Holding, pages: int) -> None:
        """Give ``holding`` private pages, evicting as needed. Raises ``RuntimeError`` if home does not have them."""
        if pages > self.free:
            self.evict(pages - self.free)
        if pages > self.free:
            raise RuntimeError(f"home: {pages} pages wanted, {self.free} free and {self.evictable} evictable of {self.pages}")
        self.free -= pages
        self.private += pages
        holding.private += pages

    def insert(self, holding: Holding, pages: int) -> None:
        """Move the private pages up to ``pages`` into the tree and lock them; pages the tree had already are freed."""
        if not self.reuse or pages <= holding.locked:
            return
        self._clock += 1
        for index in range(holding.locked, pages):
            page_hash = holding.hashes[index]
            page = self._tree.get(page_hash)
            if page is None:
                parent = holding.hashes[index - 1] if index else None
                page = self._tree[page_hash] = _Page(parent)
                if parent is not None:
                    self._tree[parent].children += 1
                self.evictable += 1
            else:
                self.free += 1
            page.used = self._clock
        moved = pages - holding.locked
        self.private -= moved
        holding.private -= moved
        self.lock(holding, pages)

    def release(self, holding: Holding) -> None:
        """The request ends or is retracted: private pages are free, locked ones may be evicted."""
        self.free += holding.private
        self.private -= holding.private
        holding.private = 0
        self.unlock(holding)

    def evict(self, pages: int) -> None:
        """Free up to ``pages`` pages, least recently used leaves first."""
        while pages > 0 and self._leaves:
            used, page_hash = heapq.heappop(self._leaves)
            page = self._tree.get(page_hash)
            if page is None or page.locks or page.children:
                continue
            if page.used != used:
                heapq.heappush(self._leaves, (page.used, page_hash))
                continue
            del self._tree[page_hash]
            self.free += 1
            self.evictable -= 1
            self.evicted += 1
            pages -= 1
            if page.parent is not None:
                parent = self._tree[page.parent]
                parent.children -= 1
                self._offer(page.parent, parent)

    def _offer(self, page_hash: str, page: _Page) -> None:
        if page.locks == 0 and page.children == 0:
            heapq.heappush(self._leaves, (page.used, page_hash))

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless free + private + cached = total and evictable counts the unlocked pages."""
        cached = len(self._tree)
        if self.free + self.private + cached != self.pages or min(self.free, self.private) < 0:
            raise RuntimeError(f"home: free {self.free} + private {self.private} + cached {cached} != {self.pages}")
        unlocked = sum(page.locks == 0 for page in self._tree.values())
        if unlocked != self.evictable:
            raise RuntimeError(f"home: {unlocked} pages are unlocked, {self.evictable} counted as evictable")
