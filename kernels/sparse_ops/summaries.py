"""Per-page bounds of the keys (Quest): ``summaries [N, H, 2, D]`` holds min and max over the live tokens of a page.

A page's first token overwrites what an earlier owner left, so that a bound covers exactly the live tokens (invariant 4).
"""

from __future__ import annotations

import torch


def update_minmax_token(summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> None:
    """Fold one new token a request into its open page.

    Args:
        summaries: ``[N, H, 2, D]`` of one layer, updated in place.
        k: ``[B, H, D]`` keys of the new tokens.
        pages, offsets: ``[B]`` int64 home page (distinct) and place in the page; offset 0 begins the page anew.
    """
    bounds = summaries[pages]
    fresh = (offsets == 0)[:, None, None]
    low = torch.where(fresh, k, torch.minimum(bounds[:, :, 0], k))
    high = torch.where(fresh, k, torch.maximum(bounds[:, :, 1], k))
    summaries[pages] = torch.stack((low, high), 2)


def update_minmax_chunk(summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, first_offset: int, page_size: int) -> None:
    """Fold a run of consecutive tokens of one request into its pages.

    Args:
        summaries: ``[N, H, 2, D]`` of one layer, updated in place.
        k: ``[T, H, D]`` keys, T >= 1.
        pages: ``[ceil((first_offset + T) / page_size)]`` int64 home pages that the run touches, in order.
        first_offset: place of the first token in its page; when it is not 0 the first page keeps what it has.
        page_size: tokens a page.

    Raises:
        ValueError: if ``pages`` is not as long as the run asks.
    """
    tokens = k.shape[0]
    count = pages.numel()
    if count != -(-(first_offset + tokens) // page_size):
        raise ValueError(f"{tokens} tokens from offset {first_offset} touch {-(-(first_offset + tokens) // page_size)} pages, got {count}")
    if count == 0:
        return
    tail = count * page_size - first_offset - tokens
    low = _by_page(k, first_offset, tail, float("inf"), page_size).amin(1)
    high = _by_page(k, first_offset, tail, float("-inf"), page_size).amax(1)
    if first_offset:
        before = summaries[pages[0]]
        low[0] = torch.minimum(low[0], before[:, 0])
        high[0] = torch.maximum(high[0], before[:, 1])
    summaries[pages] = torch.stack((low, high), 2)


def _by_page(k: torch.Tensor, head: int, tail: int, neutral: float, page_size: int) -> torch.Tensor:
    """``[T, H, D]`` as ``[pages, P, H, D]``, what is missing at both ends filled with the bound's neutral element."""
    if head or tail:
        k = torch.cat((k.new_full((head, *k.shape[1:]), neutral), k, k.new_full((tail, *k.shape[1:]), neutral)))
    return k.view(-1, page_size, *k.shape[1:])
