"""Attend everything: the same path with a budget without limit."""

from __future__ import annotations

import torch

from sglang_ext.algorithms.base import PageIds, RowsView, SparseAlgorithm, forced_and_latest


class Dense(SparseAlgorithm):
    """Every page of every row."""

    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        """All pages: the spans of a budget without limit cover the context."""
        return forced_and_latest(view.spans, q.shape[1])
