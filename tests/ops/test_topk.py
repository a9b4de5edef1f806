"""From scores to pages: against the plain form, and by what must hold at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ops import select_pages, select_pages_reference

from sglang_ext.policy import PageBudget, PageSpan


@st.composite
def _spans(draw: st.DrawFn) -> PageSpan:
    """Any span that a budget can make: sink, candidates, window of at least the open page."""
    sink, candidates, window = draw(st.integers(0, 4)), draw(st.integers(0, 12)), draw(st.integers(1, 4))
    return PageSpan(sink + candidates + window, sink, sink + candidates, draw(st.integers(0, candidates)))


def _check(scores: torch.Tensor, spans: list[PageSpan]) -> None:
    pages = select_pages(scores, spans)
    assert pages.dtype == np.int32
    assert pages.shape == (len(spans), scores.shape[1], max(span.selected for span in spans))
    for b, span in enumerate(spans):
        for h in range(scores.shape[1]):
            row = pages[b, h].tolist()
            assert row[: span.selected] == select_pages_reference(scores[b, h].numpy(), span)
            assert row[span.selected :] == [-1] * (len(row) - span.selected)
            assert len(set(row[: span.selected])) == span.selected


@settings(max_examples=200, deadline=None)
@given(
    spans=st.lists(_spans(), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    values=st.sampled_from([1, 2, 5, 1000]),
    extra=st.integers(0, 3),
    seed=st.integers(0, 9999),
)
def test_equals_the_plain_form(spans: list[PageSpan], heads: int, values: int, extra: int, seed: int) -> None:
    """Random scores, constant ones and many ties; requests of different lengths; a table wider than the longest request."""
    width = max(span.pages for span in spans) + extra
    draw = torch.randint(-values + 1, values, (len(spans), heads, width), generator=torch.Generator().manual_seed(seed))
    _check(draw.float() / 7, spans)


def test_ties_go_to_the_lowest_page() -> None:
    """Constant scores: the first candidates win."""
    pages = select_pages(torch.zeros(1, 2, 12), [PageSpan(pages=12, sink=1, window_first=10, chosen=3)])
    assert pages.tolist() == [[[0, 1, 2, 3, 10, 11]] * 2]


def test_overlap_of_sets_is_counted_once() -> None:
    """Sink {0}, window {5, 6} and best scores on 0, 5 and 3: the union, each page once (edge case 6)."""
    scores = torch.tensor([[[9.0, 0.0, 0.0, 7.0, 0.0, 8.0, 0.0]]])
    assert select_pages(scores, [PageSpan(pages=7, sink=1, window_first=5, chosen=1)]).tolist() == [[[0, 3, 5, 6]]]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_scores_of_what_is_no_candidate_do_not_matter(wrong: float) -> None:
    """Sink and window pages and what lies beyond the request may hold anything."""
    scores = torch.arange(14.0).expand(1, 2, 14).clone()
    span = PageSpan(pages=12, sink=2, window_first=9, chosen=3)
    want = select_pages(scores, [span])
    scores[:, :, :2] = wrong
    scores[:, :, 9:] = wrong
    assert np.array_equal(select_pages(scores, [span]), want)


def test_candidates_of_the_lowest_score_go_before_no_candidates() -> None:
    """A bound may overflow to -inf: the page is still a candidate, and the row is still full."""
    scores = torch.full((1, 1, 8), -float("inf"))
    assert select_pages(scores, [PageSpan(pages=8, sink=2, window_first=7, chosen=2)]).tolist() == [[[0, 1, 2, 3, 7]]]


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_sink_and_window_stay_at_the_boundary_of_the_budget(page: int, over: int) -> None:
    """Page 0 and the open page score lowest; one token less than the budget, just as many, one more (edge case 7)."""
    budget = PageBudget(page, 10 * page, page, 2 * page)
    span = budget.span(10 * page + over)
    scores = torch.arange(float(span.pages)).roll(-1)[None, None]
    scores[..., 0] = scores[..., -1] = -1e9
    (row,) = select_pages(scores, [span])[0].tolist()
    assert {0, span.pages - 1, span.pages - 2} <= set(row)
    assert len(row) == min(10, span.pages)  # sink and window count inside the budget
    if over <= 0:
        assert row == list(range(span.pages))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_a_context_that_fits_the_budget_is_selected_whole(tokens: int) -> None:
    """A budget far beyond the context: every page once, and no page that does not exist (edge case 2)."""
    span = PageBudget(16, 1024, 64, 256).span(tokens)
    pages = -(-tokens // 16)
    assert select_pages(torch.zeros(1, 3, pages), [span]).tolist() == [[list(range(pages))] * 3]


def test_one_request_without_choice_beside_one_with() -> None:
    """A short request in a batch with a long one: its row is padded, the other's choice unharmed."""
    spans = [PageSpan(pages=2, sink=0, window_first=0, chosen=0), PageSpan(pages=9, sink=1, window_first=8, chosen=3)]
    scores = torch.tensor([5.0, 1, 9, 2, 9, 3, 8, 0, 7]).expand(2, 1, 9)
    assert select_pages(scores, spans).tolist() == [[[0, 1, -1, -1, -1]], [[0, 2, 4, 6, 8]]]
