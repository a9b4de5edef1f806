"""Fixed buffers and the ledger: the arithmetic of frames, and that none is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.policy import AdmissionError, FixedBuffers, FrameLedger, PageBudget, RowPlan

DENSE = PageBudget(4, None)
SPARSE = PageBudget(4, 24, sink=4, window=8)  # 6 pages


def _ledger(total: int, factor: float = 2.0) -> FrameLedger:
    return FrameLedger(total, FixedBuffers([DENSE, SPARSE], kv_heads=2, factor=factor))


def test_capacity_is_a_factor_of_the_mandatory_pages() -> None:
    plan = FixedBuffers([DENSE, SPARSE, SPARSE], kv_heads=2, factor=2.5).plan(99)
    # 99 tokens and one more that the overlap scheduler writes: 25 pages.
    assert plan == RowPlan((25, 15, 15), 2)
    assert plan.frames == 110


def test_capacity_is_never_more_than_the_request_can_have() -> None:
    for tokens in range(1, 60):
        pages = math.ceil((tokens + 1) / 4)
        assert FixedBuffers([DENSE, SPARSE], kv_heads=1, factor=5.0).plan(tokens).capacity == (pages, min(pages, 30))


@pytest.mark.parametrize(("extra", "pages"), [(0, 2), (1, 3), (4, 3), (5, 4)])
def test_tokens_beyond_the_limit_have_frames(extra: int, pages: int) -> None:
    assert FixedBuffers([DENSE], kv_heads=1, extra_tokens=extra).plan(8).capacity == (pages,)


@settings(max_examples=200, deadline=None)
@given(
    factor=st.floats(1, 8), tokens=st.integers(1, 500), page=st.integers(1, 16), budget=st.one_of(st.integers(200, 400), st.floats(0.01, 1.0))
)  # fmt: skip
def test_a_row_has_frames_for_what_any_step_selects(factor: float, tokens: int, page: int, budget: int | float) -> None:
    pages = PageBudget(page, budget, sink=5, window=17)
    capacity = FixedBuffers([pages], 1, factor).plan(tokens).capacity[0]
    assert capacity >= max(pages.span(length).selected for length in range(1, tokens + 2))


@pytest.mark.parametrize("factor", [0.99, 0, -1, math.nan, math.inf])
def test_a_factor_that_cannot_serve_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"buffer_factor\(="):
        FixedBuffers([SPARSE], 1, factor)


def test_admission_counts_frames() -> None:
    ledger = _ledger(100)
    assert ledger.buffers.plan(39).frames == (10 + 10) * 2
    assert ledger.admit("a", 39) == RowPlan((10, 10), 2)
    assert (ledger.used, ledger.free) == (40, 60)
    assert ledger.admit("a", 39) == RowPlan((10, 10), 2)  # known: nothing more is taken
    assert ledger.used == 40
    assert ledger.admit("b", 39) is not None
    assert ledger.admit("c", 39) is None  # 20 are free, 40 are needed: it waits
    assert (ledger.refusals, ledger.used) == (1, 80)
    assert ledger.admit("d", 19) is not None  # (5 + 5) * 2 = 20: exactly what is free
    assert ledger.free == 0
    ledger.release("a")
    ledger.release("a")
    ledger.release("never seen")
    assert ledger.free == 40
    assert ledger.admit("c", 39) is not None
    ledger.check_integrity()


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    ledger = _ledger(63)
    ledger.check_possible(59)  # 15 + 12 pages, 2 heads: 54
    ledger.check_possible(75)  # 19 + 12: 62
    with pytest.raises(AdmissionError) as caught:
        ledger.check_possible(79)
    message = str(caught.value)
    assert "up to 79 tokens needs 64 device frames (2 layers x 2 KV heads, up to 20 pages a row)" in message
    assert "the device tier has 63" in message
    for option in ("--sparse-device-memory", "--sparse-buffer-factor", "--sparse-budget", "--sparse-dense-layers", "max_new_tokens"):
        assert option in message
    assert (ledger.used, ledger.refusals) == (0, 0)


@settings(max_examples=150, deadline=None)
@given(total=st.integers(0, 300), steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 120), st.booleans()), min_size=1, max_size=60))
def test_frames_are_conserved(total: int, steps: list[tuple[int, int, bool]]) -> None:
    ledger = _ledger(total)
    held: dict[int, int] = {}
    refusals = 0
    for key, tokens, leaves in steps:
        if leaves:
            ledger.release(key)
            held.pop(key, None)
        else:
            frames = ledger.buffers.plan(tokens).frames
            fits = key in held or frames <= total - sum(held.values())
            plan = ledger.admit(key, tokens)
            assert (plan is not None) == fits
            refusals += not fits
            if plan is not None:
                assert held.setdefault(key, frames) == plan.frames
        assert ledger.used == sum(held.values())
        assert ledger.free == total - sum(held.values()) >= 0
        assert ledger.refusals == refusals
        ledger.check_integrity()
    for key in range(10):
        ledger.release(key)
    assert (ledger.used, ledger.free) == (0, total)


def test_integrity_sees_a_lost_frame() -> None:
    ledger = _ledger(100)
    ledger.admit("a", 39)
    ledger.used -= 1
    with pytest.raises(RuntimeError, match="sum of reservations 40 != used 39"):
        ledger.check_integrity()
    ledger.used, ledger.total = 40, 39
    with pytest.raises(RuntimeError, match="total 39"):
        ledger.check_integrity()
