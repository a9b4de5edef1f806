"""StreamingLLM: the first tokens (attention sinks) and the most recent ones that fit the budget (Xiao et al., 2023)."""

from __future__ import annotations

import torch

from sglang_ext.algorithms.base import PageIds, RowsView, SparseAlgorithm, forced_and_latest


class Streaming(SparseAlgorithm):
    """Sink pages, then the latest pages up to the budget; keys keep the positions that they were written with."""

    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        """By position alone."""
        return forced_and_latest(view.spans, q.shape[1])
