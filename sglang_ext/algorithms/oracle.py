"""Page oracle: pages ranked by the softmax mass that they truly hold. Reads all keys from home; for tests and studies only."""

from __future__ import annotations

import torch
from sparse_ops import page_mass, select_pages

from sglang_ext.algorithms.base import PageIds, RowsView, SparseAlgorithm


class PageOracle(SparseAlgorithm):
    """Upper control of selection at page granularity; its reads of home are not counted as link traffic."""

    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        """Top pages by mass summed over the group."""
        keys = view.home[view.table][:, :, :, 0].permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, H, N * P, D]
        page_size = view.home.shape[3]
        return select_pages(page_mass(q, keys, view.tokens, page_size, view.scale), view.spans)
