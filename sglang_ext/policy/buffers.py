"""How many frames a row owns: mandatory pages and a fixed factor of buffering pages (SPIN section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.policy.budget import PageBudget


@dataclass(frozen=True)
class RowPlan:
    """Frames that a request's rows own.

    Attributes:
        capacity: frames a row, one entry a layer; the rows of a layer own equally many.
        kv_heads: rows a layer.
    """

    capacity: tuple[int, ...]
    kv_heads: int

    @property
    def frames(self) -> int:
        """Frames that the request owns over all layers and KV heads."""
        return sum(self.capacity) * self.kv_heads


class FixedBuffers:
    """Capacity = ``factor`` x mandatory pages, never more than the pages that the request can ever have.

    SPIN's minimum is 5x the mandatory pages; the hit ratio saturates there (Fig. 16; our own numbers: 3-4x is the knee).

    Args:
        budgets: the page budget of each layer (dense layers have one without a limit).
        kv_heads: KV heads of this rank.
        factor: frames a row in multiples of its mandatory pages, >= 1.
        extra_tokens: tokens that a request may write beyond its own limit (the overlap scheduler runs one step more).

    Raises:
        ValueError: if ``factor`` < 1 or not finite.
    """

    def __init__(self, budgets: Sequence[PageBudget], kv_heads: int, factor: float = 5.0, extra_tokens: int = 1) -> None:
        if not 1 <= factor < math.inf:
            raise ValueError(f"buffer_factor(={factor}) must be a finite number >= 1: a row needs frames for the pages that a step attends")
        self.budgets = tuple(budgets)
        self.kv_heads = kv_heads
        self.factor = factor
        self.extra_tokens = extra_tokens

    def plan(self, max_tokens: int) -> RowPlan:
        """Frames for a request that grows to ``max_tokens`` tokens (prompt and new tokens)."""
        tokens = max_tokens + self.extra_tokens
        capacity = []
        for budget in self.budgets:
            mandatory = budget.mandatory(tokens)
            capacity.append(min(budget.pages_of(tokens), int(self.factor * mandatory)))
        return RowPlan(tuple(capacity), self.kv_heads)
