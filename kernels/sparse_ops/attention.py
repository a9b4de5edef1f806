"""Exact attention: dense over contiguous keys (prefill), and over the frames of rows (decode)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_dense_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain form of :func:`attend_dense`; scores are materialised in float32."""
    groups = q.shape[0] // k.shape[0]
    keys = k.repeat_interleave(groups, 0).float()
    values = v.repeat_interleave(groups, 0).float()
    scores = (q.float() @ keys.transpose(-1, -2)) * scale
    if causal:
        rows = torch.arange(q.shape[1], device=q.device)[:, None] + (k.shape[1] - q.shape[1])
        scores = scores.masked_fill(torch.arange(k.shape[1], device=q.device)[None, :] > rows, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse).unsqueeze(-1))
    return (weights @ values).to(q.dtype), lse


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk over contiguous keys, with its LSE.

    Args:
        q: ``[H * G, Tq, D]``.
        k, v: ``[H, Tk, D]``; ``Tk`` may be 0 (nothing is attended: output 0, LSE -inf).
        scale: factor of the scores.
        causal: query ``i`` sees keys up to ``i`` (then ``Tk == Tq``); else every key.

    Returns:
        ``(out [H * G, Tq, D], lse [H * G, Tq] float32)``.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal attention needs as many keys(={k.shape[1]}) as queries(={q.shape[1]})")
    if k.shape[1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    if q.device.type != "cpu":
        return attend_dense_reference(q, k, v, scale, causal=causal)
    groups = q.shape[0] // k.shape[0]
    keys = k.repeat_interleave(groups, 0).unsqueeze(0)
    values = v.repeat_interleave(groups, 0).unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.unsqueeze(0), keys, values, 0.0, causal, scale=scale)
    return out[0], lse[0]


def attend_frames_reference(
    q: torch.Tensor, k_frames: torch.Tensor, v_frames: torch.Tensor, frames: torch.Tensor, tokens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain form of :func:`attend_frames`, one row at a time, with its LSE ``[B, H, G]``."""
    batch, heads, group, _ = q.shape
    out = torch.zeros_like(q)
    lse = q.new_full((batch, heads, group), float("-inf"), dtype=torch.float32)
    for b in range(batch):
        for h in range(heads):
            keys = k_frames[frames[b, h]].flatten(0, 1)[: int(tokens[b])]
            values = v_frames[frames[b, h]].flatten(0, 1)[: int(tokens[b])]
            scores = (q[b, h].float() @ keys.float().T) * scale
            lse[b, h] = torch.logsumexp(scores, -1)
            out[b, h] = (torch.softmax(scores, -1) @ values.float()).to(q.dtype)
    return out, lse


def attend_frames(
    q: torch.Tensor, k_frames: torch.Tensor, v_frames: torch.Tensor, frames: torch.Tensor, tokens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Decode attention of rows over the frames of their selected pages.

    Args:
        q: ``[B, H, G, D]``, one query token a request.
        k_frames, v_frames: ``[F, P, D]`` frames of every row.
        frames: ``[B, H, S]`` int64 frame of each selected page in ascending page order; padding may name any frame of finite values.
        tokens: ``[B]`` valid tokens of a row's ``S * P``; the last selected page is the open one, so they are a prefix.
        scale: factor of the scores.

    Returns:
        ``[B, H, G, D]``.
    """
    batch, heads, pages = frames.shape
    page, dim = k_frames.shape[1:]
    flat = frames.reshape(-1)
    keys = k_frames[flat].view(batch, heads, pages * page, dim)
    values = v_frames[flat].view(batch, heads, pages * page, dim)
    longest = int(tokens.max())
    mask = None
    if batch > 1 and int(tokens.min()) != longest:
        mask = (torch.arange(longest, device=q.device)[None, :] < tokens[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, keys[:, :, :longest], values[:, :, :longest], attn_mask=mask, scale=scale)
