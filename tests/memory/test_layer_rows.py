"""Bucketed LRU over the serving side's tables: every selected page is found in the frame that holds its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse_ops import gather_pages

from sglang_ext.memory.frames import DUMMY, DeviceTier, FramePool, LayerRows
from sglang_ext.policy import BucketedLRU, FlatPageTable, RowPlan

HEADS, REQUESTS, PAGES = 3, 4, 100
SLOTS = 9


def _selection(rng: np.random.Generator, pages: int, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """``[rows, S]`` ascending distinct pages among ``pages``, favouring few so that there are hits; the newest always in."""
    weights = 1.0 / np.arange(1, pages)
    chosen = [np.sort(rng.choice(pages - 1, min(4, pages - 1), replace=False, p=weights / weights.sum())) for _ in range(rows)]
    return np.concatenate((np.array(chosen), np.full((rows, 1), pages - 1)), 1).astype(np.int32)


def test_row_numbers() -> None:
    """Request slot x KV heads + KV head."""
    rows = LayerRows(REQUESTS, HEADS, SLOTS, PAGES)
    assert rows.rows_of(np.array([2, 0])).tolist() == [6, 7, 8, 0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_two_level_and_flat_tables_take_the_same_decisions(seed: int) -> None:
    """Slots, hits and misses of 150 steps (past the 64 stamps) are those of the policy over a flat table."""
    rng = np.random.default_rng(seed)
    served = LayerRows(REQUESTS, HEADS, SLOTS, PAGES)
    flat = BucketedLRU(REQUESTS * HEADS, SLOTS, FlatPageTable(REQUESTS * HEADS, PAGES))
    for lru in (served.lru, flat):
        lru.open(np.arange(REQUESTS * HEADS), SLOTS)
    for step in range(150):
        live = np.sort(rng.choice(REQUESTS, rng.integers(1, REQUESTS + 1), replace=False))
        rows = served.rows_of(live)
        if step % 40 == 39:
            for lru in (served.lru, flat):
                lru.close(rows)
                lru.open(rows, SLOTS - 2)
        pages = _selection(rng, 30 + step // 3, len(rows))
        got, want = served.lru.access(rows, pages), flat.access(rows, pages)
        for one, other in zip(got, want, strict=True):
            assert np.array_equal(one, other)
        served.lru.check_integrity()
        served.table.check_integrity()
    assert np.array_equal(served.lru.page, flat.page)


def test_every_selected_page_is_read_from_its_own_frame() -> None:
    """Home's pages hold their own (request page, head) number; after each step the frames of the selection hold theirs.

    Two requests share the pool and one slot is reused by a third, so that a frame of an earlier owner would show.
    """
    rng = np.random.default_rng(0)
    tier = DeviceTier(FramePool(2 * HEADS * SLOTS, 8, 4, torch.float32, "cpu"), REQUESTS, HEADS, [SLOTS], PAGES)
    layer = tier.layers[0]
    number = torch.arange(PAGES * HEADS, dtype=torch.float32).view(PAGES, HEADS)
    plan = RowPlan((SLOTS,), HEADS)
    misses = hits = 0
    for owner, slot in enumerate((1, 3, 1)):
        if tier.is_open(slot):
            tier.close(slot)
        tier.open(slot, plan)
        home = (number + 1000 * (owner + 1))[:, :, None, None, None].expand(PAGES, HEADS, 2, 8, 4).contiguous()
        rows = layer.rows_of(np.array([slot]))
        for step in range(60):
            pages = _selection(rng, 40 + step // 2, HEADS)
            access = layer.lru.access(rows, pages)
            frames = layer.frames[rows[:, None], access.slots]
            assert (frames != DUMMY).all()
            assert len(np.unique(frames)) == frames.size  # one page in one frame
            row, col = np.nonzero(access.miss)
            gather_pages(
                home,
                torch.from_numpy(pages[row, col].astype(np.int64)),
                torch.from_numpy(row),
                tier.pool.k,
                tier.pool.v,
                torch.from_numpy(frames[row, col].astype(np.int64)),
            )
            want = number[torch.from_numpy(pages.astype(np.int64)), torch.arange(HEADS)[:, None]] + 1000 * (owner + 1)
            for pool in (tier.pool.k, tier.pool.v):
                assert torch.equal(pool[torch.from_numpy(frames.astype(np.int64))], want[..., None, None].expand(*want.shape, 8, 4))
            misses, hits = misses + len(row), hits + int(access.hit.sum())
            tier.check_integrity()
    assert misses > 500
    assert hits > 500
