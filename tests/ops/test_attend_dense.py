"""Prefill attention with its LSE, against one query at a time in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sparse_ops import attend_dense, attend_dense_reference

from tests.ops.cases import DTYPES, head_dim_cases, make, page_cases, plain_attention, tolerance

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
FORMS = [attend_dense, attend_dense_reference]


def _check(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    scale = q.shape[-1] ** -0.5
    out, lse = attend(q, k, v, scale, causal=causal)
    group = q.shape[0] // k.shape[0]
    want = torch.empty(q.shape, dtype=torch.float64)
    want_lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = i + 1 if causal else k.shape[1]
            want[head, i], want_lse[head, i] = plain_attention(q[head, i], k[head // group, :seen], v[head // group, :seen], scale)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, **tolerance(q.dtype))
    # Scores are summed in float32 whatever the inputs are.
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4 if q.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize(("heads", "group", "dim"), head_dim_cases())
def test_equals_plain_attention_for_every_group_and_head_dim(
    attend: Attend, heads: int, group: int, dim: int, dtype: torch.dtype, causal: bool
) -> None:
    """GQA groups and head dims, a chunk of 7 tokens (edge cases 10 and 11)."""
    q, k, v = (make(n, 7, dim, seed=s, dtype=dtype) for s, n in enumerate((heads * group, heads, heads)))
    _check(attend, q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize("tokens", sorted({tokens for page, tokens in page_cases() if page in (8, 16)}))
def test_equals_plain_attention_at_every_length(attend: Attend, tokens: int, causal: bool) -> None:
    """Lengths around a page boundary (edge case 3); without a mask there are fewer queries than keys, as over a prefix."""
    q = make(4, tokens if causal else 3, 64, seed=1)
    _check(attend, q, make(2, tokens, 64, seed=2), make(2, tokens, 64, seed=3), causal=causal)


@pytest.mark.parametrize("attend", FORMS)
def test_takes_transposed_views(attend: Attend) -> None:
    """The backend hands in ``[T, H, D]`` transposed, without a copy."""
    q, k, v = make(17, 6, 64, seed=1).transpose(0, 1), make(17, 2, 64, seed=2).transpose(0, 1), make(17, 2, 64, seed=3).transpose(0, 1)
    _check(attend, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attend", FORMS)
def test_no_keys_give_zero_and_minus_infinity(attend: Attend, dtype: torch.dtype) -> None:
    """An empty side is (0, -inf), which a merge then ignores (edge case 4)."""
    q, empty = make(6, 5, 64, seed=1, dtype=dtype), torch.empty(2, 0, 64, dtype=dtype)
    out, lse = attend(q, empty, empty, 0.125, causal=False)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((6, 5), float("-inf")))


def test_causal_with_another_number_of_keys_is_refused() -> None:
    """Which key is a query's own would be a guess."""
    with pytest.raises(ValueError, match=r"keys\(=4\) as queries\(=3\)"):
        attend_dense(make(2, 3, 64, seed=1), make(2, 4, 64, seed=2), make(2, 4, 64, seed=3), 0.1, causal=True)


def test_large_scores_do_not_overflow() -> None:
    """Scores of 1e4: the softmax is of differences."""
    q, k, v = make(2, 9, 64, seed=1) * 100, make(2, 9, 64, seed=2) * 100, make(2, 9, 64, seed=3)
    for attend in FORMS:
        out, lse = attend(q, k, v, 0.125, causal=True)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()
