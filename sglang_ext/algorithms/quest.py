"""Quest: pages ranked by an upper bound of q.k over the box of their keys (Tang et al., 2024).

For GQA the score of a row is the max over the group's query heads; bounds are compared unscaled.
"""

from __future__ import annotations

import torch
from sparse_ops import quest_bounds, select_pages, update_minmax_chunk, update_minmax_token

from sglang_ext.algorithms.base import PageIds, RowsView, SparseAlgorithm


class Quest(SparseAlgorithm):
    """Min and max of the keys of a page; top pages by bound."""

    def summary_shape(self, head_dim: int) -> tuple[int, ...] | None:
        """Min and max: ``(2, D)``."""
        return (2, head_dim)

    def index_chunk(self, summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, first_offset: int, page_size: int) -> None:
        """See :func:`sparse_ops.update_minmax_chunk`."""
        update_minmax_chunk(summaries, k, pages, first_offset, page_size)

    def index_token(self, summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        """See :func:`sparse_ops.update_minmax_token`."""
        update_minmax_token(summaries, k, pages, offsets)

    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        """Top pages by bound, ties to the lowest page."""
        assert view.summaries is not None
        return select_pages(quest_bounds(q, view.summaries[view.table]), view.spans)
