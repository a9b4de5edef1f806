"""How many pages a row attends, and which are in by position (DESIGN section 3).

A budget counts *tokens* a row may attend in a step, sink and recent window included, and is spent in whole pages: it is rounded
up to pages, so that a context that fits the budget in tokens also fits it in pages ("short is dense").

    pages of a row of n tokens    [0 ........................................ ceil(n / P))
    in by position                [0, sink)                     [window_first, ceil(n / P))     the last one is the open page
    chosen by the algorithm                 [sink, window_first)
"""

from __future__ import annotations

import math
from typing import NamedTuple


class PageSpan(NamedTuple):
    """Page counts of one row at one context length.

    ``sink`` pages ``[0, sink)`` and window pages ``[window_first, pages)`` are always in; ``chosen`` more come from the candidates
    ``[sink, window_first)``. ``selected`` is the sum of the three.
    """

    pages: int
    sink: int
    window_first: int
    chosen: int

    @property
    def selected(self) -> int:
        """Pages that the row attends."""
        return self.sink + (self.pages - self.window_first) + self.chosen

    @property
    def covers(self) -> bool:
        """True when every page of the row is selected: the result equals dense attention."""
        return self.selected == self.pages


class PageBudget:
    """Budget of a row in pages, as a function of the context length.

    Args:
        page_size: tokens a page.
        budget: tokens (an ``int`` >= 1), or a fraction of the context (a ``float`` in (0, 1]); ``None`` is no limit (dense).
        sink: tokens at the start that are always attended, >= 0.
        window: most recent tokens that are always attended, >= 0; the open page is in even when it is 0.

    Raises:
        ValueError: if a value is out of range, or a token budget does not hold the sink, the window and the open page.
    """

    def __init__(self, page_size: int, budget: int | float | None, sink: int = 0, window: int = 0) -> None:
        if page_size < 1:
            raise ValueError(f"page_size(={page_size}) must be >= 1")
        if sink < 0 or window < 0:
            raise ValueError(f"sink(={sink}) and window(={window}) must be >= 0")
        if isinstance(budget, float):
            if not 0.0 < budget <= 1.0:
                raise ValueError(f"budget(={budget}) as a fraction of the context must be in (0, 1]")
        elif budget is not None:
            forced = math.ceil(sink / page_size) + math.ceil(window / page_size) + 1
            if budget < 1 or math.ceil(budget / page_size) < forced:
                raise ValueError(
                    f"budget(={budget} tokens, {math.ceil(max(budget, 0) / page_size)} pages of {page_size}) must hold sink(={sink}), window(={window}) "
                    f"and the open page: at least {forced * page_size} tokens. Raise the budget, or lower sink or window"
                )
        self.page_size = page_size
        self.budget = budget
        self.sink = sink
        self.window = window
        self._sink_pages = math.ceil(sink / page_size)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def limit(self, tokens: int) -> int:
        """Pages that the budget allows a row of ``tokens`` tokens, before the row's own size bounds it."""
        if self.budget is None:
            return self.pages_of(tokens)
        if isinstance(self.budget, float):
            # 0.07 x 100 is a little more than 7 in binary, which must not cost a page more.
            return max(1, math.ceil(self.budget * tokens / self.page_size - 1e-9))
        return self.pages_of(self.budget)

    def span(self, tokens: int) -> PageSpan:
        """What a row of ``tokens`` >= 1 tokens attends at this step, its newest token included."""
        pages = self.pages_of(tokens)
        limit = min(self.limit(tokens), pages)
        first = min(max(tokens - self.window, 0) // self.page_size, pages - 1)
        sink = min(self._sink_pages, first)
        forced = sink + pages - first
        # A fraction of a short context may be smaller than what is always in: the forced pages win.
        return PageSpan(pages, sink, first, max(limit - forced, 0))

    def mandatory(self, tokens: int) -> int:
        """Most pages that a row selects at any length up to ``tokens``."""
        pages = self.pages_of(tokens)
        # The window may straddle one page more when it does not start on a page boundary.
        forced = self._sink_pages + self.pages_of(self.window) + 1
        return min(pages, max(self.limit(tokens), forced))
