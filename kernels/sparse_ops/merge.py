"""Merge partial attention over disjoint key sets by their log-sum-exp."""

from __future__ import annotations

import torch


def merge_partials(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets.

        m = max(l_a, l_b);  O = (e^(l_a - m) O_a + e^(l_b - m) O_b) / (e^(l_a - m) + e^(l_b - m))

    Args:
        out_a, out_b: ``[..., D]`` partial outputs; an empty side is all zero with LSE ``-inf`` and the other side comes back exactly.
        lse_a, lse_b: ``[...]`` natural log-sum-exp of the scaled scores, float32.

    Returns:
        ``(out [..., D], lse [...])``; both sides empty gives (0, -inf).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Two empty sides would give -inf - -inf = nan: they weigh nothing.
    base = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - base).unsqueeze(-1)
    weight_b = torch.exp(lse_b - base).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
