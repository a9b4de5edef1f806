"""Copies between the tiers: home <-> frames and workspace. Plain indexing is both the reference and the CPU platform's form.

Home of one layer is ``[N, H, 2, P, D]`` (page, KV head, K or V, token, dim); frames are ``[F, P, D]`` of K and of V, one page of one
KV head each.
"""

from __future__ import annotations

import torch


def store_tokens(home: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write-through: ``k, v [T, H, D]`` to the logical token slots ``[T]`` int64 of ``home [N, H, 2, P, D]``."""
    page_size = home.shape[3]
    page = slots // page_size
    offset = slots % page_size
    home[page, :, 0, offset] = k.to(home.dtype)
    home[page, :, 1, offset] = v.to(home.dtype)


def gather_prefix(home: torch.Tensor, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[H, tokens, D]`` of home pages ``[n]`` int64 in order, for the prefill workspace."""
    block = home[pages]
    heads, dim = home.shape[1], home.shape[4]
    keys = block[:, :, 0].transpose(0, 1).reshape(heads, -1, dim)
    values = block[:, :, 1].transpose(0, 1).reshape(heads, -1, dim)
    return keys[:, :tokens], values[:, :tokens]


def gather_pages(
    home: torch.Tensor, pages: torch.Tensor, heads: torch.Tensor, k_frames: torch.Tensor, v_frames: torch.Tensor, frames: torch.Tensor
) -> None:
    """Retrieve: head pages ``(pages[i], heads[i])`` of ``home`` into ``frames[i]``; all index tensors ``[n]`` int64."""
    k_frames[frames] = home[pages, heads, 0]
    v_frames[frames] = home[pages, heads, 1]


def append_token(
    k_frames: torch.Tensor, v_frames: torch.Tensor, frames: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write the newest token ``k, v [B, H, D]`` into the open page's frame ``[B, H]`` at ``offsets [B]``."""
    where = offsets[:, None].expand_as(frames)
    k_frames[frames, where] = k.to(k_frames.dtype)
    v_frames[frames, where] = v.to(v_frames.dtype)
