"""Scores of pages against their formulas taken literally."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ops import mean_scores, page_mass, quest_bounds

from tests.ops.cases import DTYPES, HEADS, head_dim_cases, make, page_cases


def _bounds_of(k: torch.Tensor, page: int) -> torch.Tensor:
    """``[B, N, H, 2, D]`` of keys ``[B, N * P, H, D]``."""
    paged = k.view(k.shape[0], -1, page, *k.shape[2:])
    return torch.stack((paged.amin(2), paged.amax(2)), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), head_dim_cases())
def test_quest_equals_the_elementwise_formula(heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """Sum over dims of the larger product, then the max over the group. Float32 sums of at most 256 products: 1e-3."""
    q = make(2, heads, group, dim, seed=1, dtype=dtype)
    bounds = _bounds_of(make(2, 5 * 8, heads, dim, seed=2, dtype=dtype), 8)
    got = quest_bounds(q, bounds)
    assert got.dtype == torch.float32
    low, high = (bounds[:, :, :, side].double().permute(0, 2, 1, 3)[:, :, None] for side in (0, 1))
    query = q.double()[:, :, :, None]
    want = torch.maximum(query * low, query * high).sum(-1).amax(2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    page=st.sampled_from([1, 8, 16]), group=st.sampled_from([1, 3, 4, 7, 8]), size=st.sampled_from([1e-3, 1.0, 50.0]), seed=st.integers(0, 999)
)
def test_quest_is_an_upper_bound_of_every_key_in_the_page(page: int, group: int, size: float, seed: int) -> None:
    """No query head of the group has a larger q.k with any key of the page; the bound of a page of one key is that product."""
    q, k = make(2, 2, group, 64, seed=seed), make(2, 6 * page, 2, 64, seed=seed + 1) * size
    bound = quest_bounds(q, _bounds_of(k, page))
    products = torch.einsum("bhgd,bthd->bhtg", q.double(), k.double()).amax(-1).view(2, 2, 6, page).amax(-1)
    slack = 1e-5 * 64 * size  # float32 rounding
    assert (bound.double() >= products - slack).all()
    if page == 1:
        torch.testing.assert_close(bound.double(), products, rtol=1e-5, atol=slack)


@pytest.mark.parametrize(("heads", "group"), HEADS)
def test_mean_scores_equal_the_formula(heads: int, group: int) -> None:
    """Softmax over the mean keys a query head, the max over the group."""
    q, means = make(2, heads, group, 64, seed=1), make(2, 9, heads, 64, seed=2)
    got = mean_scores(q, means, 0.125)
    for b in range(2):
        for h in range(heads):
            weights = torch.stack([torch.softmax(means[b, :, h].double() @ q[b, h, g].double() * 0.125, 0) for g in range(group)])
            torch.testing.assert_close(got[b, h].double(), weights.amax(0), rtol=1e-4, atol=1e-6)


def _plain_mass(q: torch.Tensor, k: torch.Tensor, tokens: list[int], page: int, scale: float) -> torch.Tensor:
    batch, heads, group, _ = q.shape
    mass = torch.zeros(batch, heads, k.shape[2] // page, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                weights = torch.softmax(k[b, h, : tokens[b]].double() @ q[b, h, g].double() * scale, 0)
                for token, weight in enumerate(weights.tolist()):
                    mass[b, h, token // page] += weight
    return mass


@pytest.mark.parametrize(("page", "tokens"), page_cases())
def test_page_mass_equals_the_formula_at_every_length(page: int, tokens: int) -> None:
    """Keys beyond the live tokens are huge and have no mass."""
    pages = -(-tokens // page)
    q, k = make(1, 2, 3, 64, seed=1), make(1, 2, pages * page, 64, seed=2)
    k[:, :, tokens:] = 1e4
    got = page_mass(q, k, torch.tensor([tokens]), page, 0.125)
    torch.testing.assert_close(got.double(), _plain_mass(q, k, [tokens], page, 0.125), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "group"), HEADS)
def test_page_mass_sums_to_one_a_query_head(heads: int, group: int, dtype: torch.dtype) -> None:
    """Requests of different lengths in one batch; a page without live tokens has none."""
    tokens = torch.tensor([1, 8, 9, 31])
    mass = page_mass(make(4, heads, group, 64, seed=1, dtype=dtype), make(4, heads, 32, 64, seed=2, dtype=dtype), tokens, 8, 0.125)
    torch.testing.assert_close(mass.sum(-1), torch.full((4, heads), float(group)), rtol=1e-5, atol=1e-5)
    for b, live in enumerate(tokens.tolist()):
        assert not mass[b, :, math.ceil(live / 8) :].any()
