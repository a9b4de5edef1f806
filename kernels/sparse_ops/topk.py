"""From scores to page ids: pages in by position are forced, the best candidates fill the budget, ties go to the lowest page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Span(Protocol):
    """What :class:`sglang_ext.policy.PageSpan` offers: see there."""

    @property
    def pages(self) -> int: ...
    @property
    def sink(self) -> int: ...
    @property
    def window_first(self) -> int: ...
    @property
    def chosen(self) -> int: ...
    @property
    def selected(self) -> int: ...


def select_pages_reference(scores: npt.NDArray[np.float32], span: Span) -> list[int]:
    """Pages of one row from its scores ``[N]``, ascending: the plain form of :func:`select_pages`."""
    candidates = sorted(range(span.sink, span.window_first), key=lambda page: (-float(scores[page]), page))
    return sorted({*range(span.sink), *candidates[: span.chosen], *range(span.window_first, span.pages)})


def select_pages(scores: torch.Tensor, spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """Pages that each row attends.

    Args:
        scores: ``[B, H, N]``; only candidates ``[sink, window_first)`` of a request are looked at.
        spans: what is in by position and how many more, a request each.

    Returns:
        ``[B, H, S]`` int32, ascending in a row, -1 pads at its end. Each page at most once.
    """
    batch, heads, _ = scores.shape
    width = max(span.pages for span in spans)
    chosen = max(span.chosen for span in spans)
    picked = np.zeros((batch, heads, width), np.bool_)
    if chosen:
        position = torch.arange(scores.shape[2], device=scores.device)
        first = torch.tensor([span.sink for span in spans], device=scores.device)[:, None]
        last = torch.tensor([span.window_first for span in spans], device=scores.device)[:, None]
        candidate = (position >= first) & (position < last)
        # A candidate of score -inf still goes before what is no candidate.
        masked = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(~candidate[:, None, :], float("-inf"))
        # A stable sort keeps the lower page first among equals.
        order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[:, :, :chosen].cpu().numpy()
    for b, span in enumerate(spans):
        if span.chosen:
            np.put_along_axis(picked[b], order[b, :, : span.chosen], True, axis=1)
        picked[b, :, : span.sink] = True
        picked[b, :, span.window_first : span.pages] = True
    return pack_pages(picked, [span.selected for span in spans])


def pack_pages(picked: npt.NDArray[np.bool_], counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """``picked [B, H, N]`` with ``counts[b]`` pages in each row of request b, as ascending ids ``[B, H, max(counts)]``, -1 padded."""
    batch, heads, _ = picked.shape
    most = max(counts)
    pages = np.full((batch, heads, most), -1, np.int32)
    for b, count in enumerate(counts):
        pages[b, :, :count] = np.nonzero(picked[b])[1].reshape(heads, count)
    return pages
