"""Shapes that broke systems of this kind, and makers of random tensors for them."""

from __future__ import annotations

import itertools
import math

import torch

NAN = float("nan")
HEADS = [(1, 1), (2, 3), (2, 4), (4, 7), (2, 8), (5, 8), (1, 64)]
"""(KV heads, query heads a KV head): groups 1, 3, 4, 7, 8, among them (Hq, Hkv) = (28, 4), (40, 5) and (64, 1)."""
HEADS.append((8, 5))  # (40, 8)

DIMS = [64, 80, 96, 106, 128, 256]
PAGES = [8, 16, 32, 64]
DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Against a float64 reference on the same inputs: float32 rounds sums, bfloat16 also rounds the result (8 bits)."""
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def lengths(page: int) -> list[int]:
    """Token counts around a page boundary, and a few pages more."""
    return [1, page - 1, page, page + 1, 3 * page + 5]


def head_dim_cases() -> list[tuple[int, int, int]]:
    """(KV heads, group, head dim): every group at one head dim, every head dim at one group."""
    return [(heads, group, 64) for heads, group in HEADS] + [(2, 3, dim) for dim in DIMS[1:]]


def page_cases() -> list[tuple[int, int]]:
    """(page size, tokens)."""
    return list(itertools.chain.from_iterable([(page, tokens) for tokens in lengths(page)] for page in PAGES))


def make(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN: what an operator does not write stays NaN, what it reads without right shows."""
    return torch.full(shape, NAN, dtype=dtype)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """One query ``[D]`` over ``k, v [T, D]`` in float64: output and log-sum-exp, (0, -inf) over nothing."""
    if not len(k):
        return torch.zeros_like(q, dtype=torch.float64), -math.inf
    scores = (k.double() @ q.double()) * scale
    lse = torch.logsumexp(scores, 0)
    return torch.exp(scores - lse) @ v.double(), float(lse)
