"""Merging partial attention by LSE."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ops import attend_dense, merge_partials

from tests.ops.cases import DTYPES, make, tolerance

INF = float("inf")


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_pieces_merge_to_the_whole(tokens: int, cuts: list[int], seed: int) -> None:
    """A prefix attended in any pieces, empty ones among them, equals the prefix attended at once."""
    q, k, v = make(6, 3, 64, seed=seed), make(2, tokens, 64, seed=seed + 1), make(2, tokens, 64, seed=seed + 2)
    whole, whole_lse = attend_dense(q, k, v, 0.125, causal=False)
    edges = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    out, lse = torch.zeros_like(q), torch.full((6, 3), -INF)
    for first, last in itertools.pairwise(edges):
        out, lse = merge_partials(out, lse, *attend_dense(q, k[:, first:last], v[:, first:last], 0.125, causal=False))
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_after_prefix_equals_causal_attention_over_all(dtype: torch.dtype) -> None:
    """What prefill does: the chunk causally, the prefix without a mask."""
    q, k, v = (make(n, 40, 80, seed=s, dtype=dtype) for s, n in enumerate((6, 2, 2)))
    whole, _ = attend_dense(q, k, v, 0.1, causal=True)
    chunk = attend_dense(q[:, 23:], k[:, 23:], v[:, 23:], 0.1, causal=True)
    prefix = attend_dense(q[:, 23:], k[:, :23], v[:, :23], 0.1, causal=False)
    out, _ = merge_partials(*chunk, *prefix)
    assert out.dtype == dtype
    torch.testing.assert_close(out, whole[:, 23:], **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_an_empty_side_returns_the_other_exactly(dtype: torch.dtype, scale: float) -> None:
    """Bit for bit, on either side, row by row (edge case 4)."""
    out, lse = (make(3, 5, 8, seed=1) * scale).to(dtype), make(3, 5, seed=2) * 50
    zero, empty = torch.zeros_like(out), torch.full_like(lse, -INF)
    for merged in (merge_partials(out, lse, zero, empty), merge_partials(zero, empty, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    some = torch.tensor([True, False, True])[:, None].expand(3, 5)
    merged_out, merged_lse = merge_partials(
        torch.where(some[..., None], out, zero), torch.where(some, lse, empty), torch.where(some[..., None], zero, out), torch.where(some, empty, lse)
    )
    assert torch.equal(merged_out, out)
    assert torch.equal(merged_lse, lse)


def test_two_empty_sides_stay_empty() -> None:
    """(0, -inf), never NaN."""
    zero, empty = torch.zeros(2, 4, 8), torch.full((2, 4), -INF)
    out, lse = merge_partials(zero, empty, zero, empty)
    assert torch.equal(out, zero)
    assert torch.equal(lse, empty)


def test_order_does_not_matter_and_far_apart_sides_do_not_overflow() -> None:
    """LSE of 1e4 against -1e4: the heavier side is what remains."""
    a, b = make(4, 8, seed=1), make(4, 8, seed=2)
    high, low = torch.full((4,), 1e4), torch.full((4,), -1e4)
    out, lse = merge_partials(a, high, b, low)
    assert torch.equal(out, a)
    assert torch.equal(lse, high)
    swapped, _ = merge_partials(b, low, a, high)
    assert torch.equal(swapped, out)
