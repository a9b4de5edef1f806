"""Scores of pages for rows: one number a (request, KV head, page), from which the top pages are taken."""

from __future__ import annotations

import torch


def quest_bounds(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Quest's upper bound of q.k over the page's box, max over the query heads of the group.

        U(page) = sum_d max(q_d * min_d, q_d * max_d);  score = max_g U

    Args:
        q: ``[B, H, G, D]``.
        bounds: ``[B, N, H, 2, D]`` min and max of the keys of each page.

    Returns:
        ``[B, H, N]`` float32, unscaled.
    """
    low = bounds[:, :, :, 0].permute(0, 2, 3, 1).float()  # [B, H, D, N]
    high = bounds[:, :, :, 1].permute(0, 2, 3, 1).float()
    query = q.float()
    # max(q lo, q hi) = relu(q) hi - relu(-q) lo: two matrix products instead of an elementwise [B, H, G, N, D].
    score = query.clamp(min=0) @ high + query.clamp(max=0) @ low
    return score.amax(2)


def mean_scores(q: torch.Tensor, means: torch.Tensor, scale: float) -> torch.Tensor:
    """ShadowKV's form: softmax over the mean keys a query head, max over the group. ``means [B, N, H, D]`` -> ``[B, H, N]``."""
    logits = (q.float() @ means.permute(0, 2, 3, 1).float()) * scale
    return torch.softmax(logits, -1).amax(2)


def page_mass(q: torch.Tensor, k: torch.Tensor, tokens: torch.Tensor, page_size: int, scale: float) -> torch.Tensor:
    """True softmax mass of each page, summed over the group: the page oracle (tests and studies only).

    Args:
        q: ``[B, H, G, D]``.
        k: ``[B, H, N * P, D]`` all keys of the rows.
        tokens: ``[B]`` live tokens.
        page_size: P.
        scale: factor of the scores.

    Returns:
        ``[B, H, N]`` float32.
    """
    logits = (q.float() @ k.float().transpose(-1, -2)) * scale
    dead = torch.arange(k.shape[2], device=q.device)[None, :] >= tokens[:, None]
    mass = torch.softmax(logits.masked_fill(dead[:, None, None, :], float("-inf")), -1).sum(2)
    return mass.view(*mass.shape[:2], -1, page_size).sum(-1)
