"""Bounds of the keys of a page: they cover exactly the live tokens, whoever owned the page before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ops import quest_bounds, update_minmax_chunk, update_minmax_token

from tests.ops.cases import DTYPES, make, page_cases, poisoned

HEADS, DIM = 2, 64
ORDER = [5, 2, 7, 1, 6]
"""Home pages of the request."""


def _check(summaries: torch.Tensor, k: torch.Tensor, page: int) -> None:
    """Every page of ``k [T, H, D]`` has its tokens' bounds; all other pages keep their poison."""
    pages = -(-k.shape[0] // page)
    for number in range(pages):
        live = k[number * page : (number + 1) * page]
        assert torch.equal(summaries[ORDER[number], :, 0], live.amin(0))
        assert torch.equal(summaries[ORDER[number], :, 1], live.amax(0))
    assert torch.isnan(summaries[[0, 3, 4, *ORDER[pages:]]]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page", "tokens"), page_cases())
def test_chunk_has_the_bounds_of_its_tokens(page: int, tokens: int, dtype: torch.dtype) -> None:
    """A prompt at once; the last page may be partial."""
    summaries, k = poisoned(8, HEADS, 2, DIM, dtype=dtype), make(tokens, HEADS, DIM, seed=1, dtype=dtype)
    update_minmax_chunk(summaries, k, torch.tensor(ORDER[: -(-tokens // page)]), 0, page)
    _check(summaries, k, page)


@pytest.mark.parametrize(("page", "tokens"), [case for case in page_cases() if case[0] < 32])
def test_token_by_token_equals_a_chunk(page: int, tokens: int) -> None:
    """Decode's running update."""
    summaries, k = poisoned(8, HEADS, 2, DIM), make(tokens, HEADS, DIM, seed=1)
    for i in range(tokens):
        update_minmax_token(summaries, k[i : i + 1], torch.tensor([ORDER[i // page]]), torch.tensor([i % page]))
    _check(summaries, k, page)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.integers(1, 20), min_size=1, max_size=5), page=st.sampled_from([8, 16]), seed=st.integers(0, 99))
def test_any_split_into_chunks_gives_the_same_bounds(parts: list[int], page: int, seed: int) -> None:
    """Chunks that begin and end inside a page, some of one token."""
    parts = parts[: 5 * page // 20] or [1]
    k = make(sum(parts), HEADS, DIM, seed=seed)
    summaries = poisoned(8, HEADS, 2, DIM)
    at = 0
    for part in parts:
        touched = ORDER[at // page : -(-(at + part) // page)]
        update_minmax_chunk(summaries, k[at : at + part], torch.tensor(touched), at % page, page)
        at += part
    _check(summaries, k, page)


def test_tokens_of_a_batch_go_to_their_own_pages() -> None:
    """One request begins a page, one goes on: only the second keeps what is there."""
    summaries = poisoned(4, HEADS, 2, DIM)
    summaries[1], summaries[3, :, 0], summaries[3, :, 1] = 1e30, -0.5, 0.5
    k = make(2, HEADS, DIM, seed=1)
    update_minmax_token(summaries, k, torch.tensor([1, 3]), torch.tensor([0, 4]))
    assert torch.equal(summaries[1], torch.stack((k[0], k[0]), 1))
    assert torch.equal(summaries[3, :, 0], k[1].clamp(max=-0.5))
    assert torch.equal(summaries[3, :, 1], k[1].clamp(min=0.5))
    assert torch.isnan(summaries[[0, 2]]).all()


@pytest.mark.parametrize("huge", [1e30, -1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("by_token", [True, False])
def test_a_new_owner_of_a_page_starts_anew(huge: float, by_token: bool) -> None:
    """First owner: a full page of huge keys. Second owner: 3 tokens. Its bounds, and a score over them, know only those (edge case 9)."""
    page = 16
    summaries = poisoned(2, HEADS, 2, DIM)
    update_minmax_chunk(summaries, torch.full((page, HEADS, DIM), huge), torch.tensor([1]), 0, page)
    k = make(3, HEADS, DIM, seed=1)
    if by_token:
        for i in range(3):
            update_minmax_token(summaries, k[i : i + 1], torch.tensor([1]), torch.tensor([i]))
    else:
        update_minmax_chunk(summaries, k, torch.tensor([1]), 0, page)
    assert torch.equal(summaries[1, :, 0], k.amin(0))
    assert torch.equal(summaries[1, :, 1], k.amax(0))
    q = make(1, HEADS, 3, DIM, seed=2)
    bound = quest_bounds(q, summaries[torch.tensor([[1]])])[0, :, 0]
    truth = torch.einsum("hgd,thd->htg", q[0], k).flatten(1).amax(1)
    assert (bound >= truth - 1e-4).all()
    assert (bound < 1e3).all()


@pytest.mark.parametrize(("tokens", "first", "pages"), [(8, 0, 2), (8, 1, 1), (1, 0, 0), (17, 7, 2)])
def test_a_wrong_number_of_pages_is_refused(tokens: int, first: int, pages: int) -> None:
    """It would leave a page without its tokens."""
    with pytest.raises(ValueError, match=rf"from offset {first} touch \d pages, got {pages}"):
        update_minmax_chunk(poisoned(8, HEADS, 2, DIM), make(tokens, HEADS, DIM, seed=1), torch.tensor(ORDER[:pages]), first, 8)
