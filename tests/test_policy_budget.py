"""Page budgets against sets of pages counted one by one."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.policy import PageBudget


def _forced(tokens: int, page: int, sink: int, window: int) -> set[int]:
    """Pages that are in by position: of the sink's tokens, of the window's, and the open page."""
    wanted = [*range(min(sink, tokens)), *range(max(tokens - window, 0), tokens), tokens - 1]
    return {token // page for token in wanted}


def _budgets() -> st.SearchStrategy[PageBudget]:
    def build(page: int, sink: int, window: int, extra: int | float | None) -> PageBudget:
        if isinstance(extra, int):
            extra += (math.ceil(sink / page) + math.ceil(window / page) + 1) * page - page + 1
        return PageBudget(page, extra, sink, window)

    extra = st.one_of(st.none(), st.integers(0, 120), st.integers(1, 100).map(lambda percent: percent / 100))
    return st.builds(build, st.sampled_from([1, 2, 3, 7, 16]), st.integers(0, 40), st.integers(0, 40), extra)


@settings(max_examples=400, deadline=None)
@given(budget=_budgets(), tokens=st.integers(1, 400))
def test_a_span_is_what_counting_gives(budget: PageBudget, tokens: int) -> None:
    page = budget.page_size
    span = budget.span(tokens)
    forced = _forced(tokens, page, budget.sink, budget.window)
    assert span.pages == len({token // page for token in range(tokens)})
    assert {*range(span.sink), *range(span.window_first, span.pages)} == forced
    assert span.sink <= span.window_first < span.pages  # the two never overlap: nothing is counted twice
    if budget.budget is None:
        allowed = span.pages
    elif isinstance(budget.budget, float):
        allowed = math.ceil(Fraction(budget.budget).limit_denominator(100) * tokens / page)
    else:
        allowed = math.ceil(budget.budget / page)
    assert span.selected == max(len(forced), min(allowed, span.pages))
    assert 0 <= span.chosen <= span.window_first - span.sink
    assert span.covers == (span.selected == span.pages)
    assert span.selected <= budget.mandatory(tokens) <= span.pages


@settings(max_examples=60, deadline=None)
@given(budget=_budgets())
def test_mandatory_holds_at_every_length_up_to_it(budget: PageBudget) -> None:
    most = 0
    for tokens in range(1, 200):
        most = max(most, budget.span(tokens).selected)
        assert budget.mandatory(tokens) >= most
        if not isinstance(budget.budget, float):
            assert budget.mandatory(tokens) == most


BOUNDARIES = sorted({(page, page * pages + offset) for page in (1, 3, 16) for pages in (1, 2, 5) for offset in (-1, 0, 1)} - {(1, 0)})


@pytest.mark.parametrize(("page", "tokens"), BOUNDARIES)
def test_a_budget_of_the_context_is_dense(page: int, tokens: int) -> None:
    for budget in (PageBudget(page, tokens), PageBudget(page, 1.0), PageBudget(page, None)):
        span = budget.span(tokens)
        assert span.covers
        assert span.selected == span.pages == math.ceil(tokens / page)


def test_around_a_page_boundary() -> None:
    budget = PageBudget(16, 64, sink=16, window=16)
    # tokens -> pages, sink, first page of the window, chosen
    assert budget.span(15) == (1, 0, 0, 0)
    assert budget.span(16) == (1, 0, 0, 0)
    assert budget.span(17) == (2, 0, 0, 0)
    assert budget.span(64) == (4, 1, 3, 2)
    assert budget.span(65) == (5, 1, 3, 1)  # the window straddles two pages: one less is chosen
    assert budget.span(80) == (5, 1, 4, 2)
    assert [budget.span(tokens).selected for tokens in (63, 64, 65, 79, 80, 81)] == [4, 4, 4, 4, 4, 4]


def test_the_open_page_is_in_without_a_window() -> None:
    budget = PageBudget(4, 4)
    for tokens in (1, 4, 5, 8, 9):
        span = budget.span(tokens)
        assert (span.window_first, span.selected) == (span.pages - 1, 1)


def test_a_fraction_below_what_is_forced_gives_what_is_forced() -> None:
    span = PageBudget(4, 0.01, sink=8, window=8).span(100)
    assert (span.sink, span.pages - span.window_first, span.chosen) == (2, 2, 0)


def test_a_fraction_is_not_rounded_up_by_binary_noise() -> None:
    assert 0.07 * 100 > 7
    assert PageBudget(1, 0.07).span(100).selected == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 16), r"page_size\(=0\) must be >= 1"),
        ((-4, None), r"page_size\(=-4\)"),
        ((16, 64, -1), r"sink\(=-1\) and window\(=0\) must be >= 0"),
        ((16, 64, 0, -2), r"window\(=-2\) must be >= 0"),
        ((16, 0.0), r"budget\(=0.0\) as a fraction of the context must be in \(0, 1\]"),
        ((16, 1.01), r"budget\(=1.01\)"),
        ((16, -0.5), r"budget\(=-0.5\)"),
        ((16, math.nan), r"budget\(=nan\)"),
        ((16, 0), r"budget\(=0 tokens, 0 pages of 16\).* at least 16 tokens"),
        ((16, -5), r"budget\(=-5 tokens"),
        ((16, 64, 16, 48), r"budget\(=64 tokens, 4 pages of 16\) must hold sink\(=16\), window\(=48\).* at least 80 tokens\. Raise the budget"),
        ((16, 48, 1, 17), r"at least 64 tokens"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments: tuple[int, int | float | None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PageBudget(*arguments)


def test_the_smallest_budget_is_accepted() -> None:
    assert PageBudget(16, 65, sink=16, window=48).span(500).chosen == 0
    assert PageBudget(16, 1).span(500).selected == 1
