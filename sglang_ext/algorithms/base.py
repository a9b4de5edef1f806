"""What a selection algorithm is: a small class with ``index`` and ``select``. The system owns offload, retrieve and attend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.policy import PageSpan

PageIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RowsView:
    """What ``select`` may look at: the rows of B requests at one layer.

    Attributes:
        spans: what each request attends by position and how many pages the algorithm may add.
        table: ``[B, N]`` int64 home page of each page of a request, 0 beyond its pages.
        tokens: ``[B]`` int64 tokens of each request, the newest included.
        summaries: ``[pages, H, ...]`` of this layer, by home page; ``None`` when the algorithm keeps none.
        home: ``[pages, H, 2, P, D]`` of this layer. Reading it crosses the link: for oracles only.
        scale: factor of the scores.
    """

    spans: Sequence[PageSpan]
    table: torch.Tensor
    tokens: torch.Tensor
    summaries: torch.Tensor | None
    home: torch.Tensor
    scale: float


class SparseAlgorithm(ABC):
    """Index and Select of one algorithm (SPIN section 4). Stateless: summaries are the system's and handed in."""

    def summary_shape(self, head_dim: int) -> tuple[int, ...] | None:
        """Shape of what is kept for one (page, KV head), in the KV dtype; ``None`` keeps nothing."""
        return None

    # The two index methods do nothing for an algorithm that keeps no summaries.
    def index_chunk(self, summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, first_offset: int, page_size: int) -> None:  # noqa: B027
        """Take in consecutive tokens ``k [T, H, D]`` of one request that touch home ``pages`` (in order), the first at ``first_offset``."""

    def index_token(self, summaries: torch.Tensor, k: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> None:  # noqa: B027
        """Take in one new token a request: ``k [B, H, D]`` at ``offsets [B]`` of home ``pages [B]``; offset 0 begins a page."""

    @abstractmethod
    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        """Pages that each row attends.

        Args:
            q: ``[B, H, G, D]`` queries after RoPE.
            view: the rows.

        Returns:
            ``[B, H, S]`` int32 page numbers within the request, ascending, each once, -1 padded; forced pages included, and exactly
            ``span.selected`` of them in a row.
        """


def forced_and_latest(spans: Sequence[PageSpan], heads: int) -> PageIds:
    """The sink and, up to the budget, the most recent pages: selection by position alone."""
    pages = np.full((len(spans), heads, max(span.selected for span in spans)), -1, np.int32)
    for b, span in enumerate(spans):
        recent = np.arange(span.window_first - span.chosen, span.pages)
        pages[b, :, : span.selected] = np.concatenate((np.arange(span.sink), recent))
    return pages
