"""The device tier: who owns which frame, over any order of opening and closing, and what its checker finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.memory.frames import DUMMY, DeviceTier, FramePool
from sglang_ext.policy import RowPlan

HEADS, REQUESTS, PAGES, PAGE = 2, 6, 70, 8
CAPACITY = (7, 12)


def _make_tier(total: int = 100) -> DeviceTier:
    return DeviceTier(FramePool(total, PAGE, 4, torch.float32, "cpu"), REQUESTS, HEADS, CAPACITY, PAGES)


def _plan(*capacity: int) -> RowPlan:
    return RowPlan(capacity, HEADS)


def _frames_of(tier: DeviceTier, slot: int, plan: RowPlan) -> list[int]:
    return [
        int(frame)
        for layer, capacity in zip(tier.layers, plan.capacity, strict=True)
        for frame in layer.frames[layer.rows_of(np.array([slot])), :capacity].reshape(-1)
    ]


def test_a_row_owns_as_many_frames_as_its_plan_says() -> None:
    """Every frame once, the dummy never, the rest of the row's table the dummy."""
    tier, plan = _make_tier(), _plan(3, 5)
    tier.open(4, plan)
    frames = _frames_of(tier, 4, plan)
    assert tier.is_open(4)
    assert not tier.is_open(3)
    assert len(set(frames)) == len(frames) == plan.frames == tier.used == 16
    assert DUMMY not in frames
    assert (tier.layers[0].frames[8:10, 3:] == DUMMY).all()
    tier.check_integrity()
    tier.close(4)
    assert tier.used == 0
    assert (tier.layers[0].frames == DUMMY).all()
    tier.check_integrity()


_MOVES = st.lists(st.tuples(st.integers(0, REQUESTS - 1), st.integers(1, CAPACITY[0]), st.integers(1, CAPACITY[1])), max_size=25)


@settings(max_examples=100, deadline=None)
@given(moves=_MOVES, total=st.sampled_from([20, 100]))
def test_frames_are_conserved_in_any_order(moves: list[tuple[int, int, int]], total: int) -> None:
    """Requests open and close; one that finds too few frames changes nothing; at the end all are free again (invariants 2 and 6)."""
    tier = _make_tier(total)
    opened: dict[int, RowPlan] = {}
    for slot, first, second in moves:
        plan = _plan(first, second)
        if slot in opened:
            tier.close(slot)
            del opened[slot]
        elif plan.frames <= tier.pool.free:
            tier.open(slot, plan)
            opened[slot] = plan
        else:
            with pytest.raises(RuntimeError, match=rf"{plan.frames} frames wanted, {tier.pool.free} of {total} free"):
                tier.open(slot, plan)
            assert not tier.is_open(slot)
        owned = [frame for slot, plan in opened.items() for frame in _frames_of(tier, slot, plan)]
        assert len(set(owned)) == len(owned) == tier.used
        assert tier.used + tier.pool.free == total
        tier.check_integrity()
    for slot in opened:
        tier.close(slot)
    assert tier.pool.free == total
    tier.check_integrity()


def test_closing_forgets_what_the_rows_held() -> None:
    """Not only at the next opening: segments of the page tables go back to their pool at once."""
    tier = _make_tier()
    tier.open(2, _plan(3, 5))
    for layer in tier.layers:
        layer.lru.warm(layer.rows_of(np.array([2])), np.array([[0, 4, 60], [1, 5, 69]], np.int32))
        assert layer.table.in_use.any()
    tier.close(2)
    for layer in tier.layers:
        assert not layer.table.in_use.any()
        assert (layer.lru.page == -1).all()
    tier.check_integrity()


def test_opening_twice_is_refused() -> None:
    """A slot that SGLang hands on must have been closed."""
    tier = _make_tier()
    tier.open(1, _plan(2, 2))
    with pytest.raises(RuntimeError, match="request slot 1 are open already"):
        tier.open(1, _plan(2, 2))
    tier.check_integrity()


def test_closing_what_is_not_open_is_ignored() -> None:
    """A request may end before it had frames."""
    tier = _make_tier()
    tier.open(1, _plan(2, 2))
    tier.close(0)
    tier.close(1)
    tier.close(1)
    assert tier.used == 0
    tier.check_integrity()


def test_the_pool_gives_no_more_than_it_has() -> None:
    """All of it, then nothing, with the arithmetic; what came back is given again."""
    pool = FramePool(5, PAGE, 4, torch.float32, "cpu")
    first = pool.take(5)
    assert sorted(first.tolist()) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="1 frames wanted, 0 of 5 free"):
        pool.take(1)
    pool.give(first[:2])
    assert sorted(pool.take(2).tolist()) == sorted(first[:2].tolist())
    assert pool.nbytes == 2 * 6 * PAGE * 4 * 4


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_write_to_the_dummy_frame_is_found(which: str) -> None:
    """Padding reads it: a single wrong number there would be a wrong answer somewhere else."""
    tier = _make_tier()
    getattr(tier.pool, which)[DUMMY, 3, 1] = 1e-3
    with pytest.raises(RuntimeError, match="dummy frame was written"):
        tier.check_integrity()


@pytest.mark.parametrize("damage", ["two owners", "lost", "given twice", "table", "limit"])
def test_damage_is_found(damage: str) -> None:
    """A frame with two owners, one that nobody has, one given back while owned, a wrong slot, a page in a slot that isn't the row's."""
    tier = _make_tier()
    tier.open(0, _plan(3, 3))
    tier.open(1, _plan(3, 3))
    layer = tier.layers[0]
    layer.lru.warm(layer.rows_of(np.array([0])), np.array([[0, 4], [1, 5]], np.int32))
    tier.check_integrity()
    if damage == "two owners":
        layer.frames[0, 0] = layer.frames[2, 0]
    elif damage == "lost":
        tier.pool.take(1)
    elif damage == "given twice":
        tier.pool.give(layer.frames[0, :1])
    elif damage == "table":
        layer.lru.page[0, 1] = 9
    else:
        layer.lru.page[0, 5] = 9
    with pytest.raises(RuntimeError, match=r"frames|row 0|slot"):
        tier.check_integrity()
