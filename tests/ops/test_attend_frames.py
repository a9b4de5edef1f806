"""Decode attention over the frames of rows, against one query at a time over exactly the selected tokens."""

from __future__ import annotations

import pytest
import torch
from sparse_ops import attend_frames, attend_frames_reference, select_pages

from sglang_ext.policy import PageSpan
from tests.ops.cases import DTYPES, head_dim_cases, make, page_cases, plain_attention, tolerance


class _Frames:
    """Frames of ``[B, H]`` rows with ``tokens[b]`` live tokens each; what lies beyond them is finite and huge, frame 0 is zero."""

    def __init__(self, tokens: list[int], heads: int, page: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        self.page = page
        self.tokens = torch.tensor(tokens)
        width = -(-max(tokens) // page)
        pages = [-(-count // page) for count in tokens]
        total = sum(pages) * heads
        order = 1 + torch.randperm(total, generator=torch.Generator().manual_seed(5))
        self.table = torch.zeros(len(tokens), heads, width, dtype=torch.int64)
        self.k, self.v = (make(total + 1, page, dim, seed=s, dtype=dtype) for s in (6, 7))
        self.k[0] = self.v[0] = 0
        taken = 0
        for b, count in enumerate(pages):
            for h in range(heads):
                self.table[b, h, :count] = order[taken : taken + count]
                taken += count
                rest = tokens[b] % page
                if rest:
                    self.k[self.table[b, h, count - 1], rest:] = 1e4
                    self.v[self.table[b, h, count - 1], rest:] = -1e4

    def row(self, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Live keys and values."""
        live = int(self.tokens[b])
        return self.k[self.table[b, h]].flatten(0, 1)[:live], self.v[self.table[b, h]].flatten(0, 1)[:live]

    def plain(self, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of every row's query heads in float64."""
        out, lse = torch.empty(q.shape, dtype=torch.float64), torch.empty(q.shape[:3], dtype=torch.float64)
        for b, h, g in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).view(-1, 3).tolist():
            out[b, h, g], lse[b, h, g] = plain_attention(q[b, h, g], *self.row(b, h), scale)
        return out, lse


def _check(q: torch.Tensor, made: _Frames) -> None:
    scale = q.shape[-1] ** -0.5
    want, want_lse = made.plain(q, scale)
    out = attend_frames(q, made.k, made.v, made.table, made.tokens, scale)
    plain, lse = attend_frames_reference(q, made.k, made.v, made.table, made.tokens, scale)
    for got in (out, plain):
        assert got.dtype == q.dtype
        torch.testing.assert_close(got.double(), want, **tolerance(q.dtype))
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4 if q.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), head_dim_cases())
def test_equals_plain_attention_for_every_group_and_head_dim(heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """Two requests of different lengths (edge cases 10 and 11)."""
    _check(make(2, heads, group, dim, seed=1, dtype=dtype), _Frames([35, 17], heads, 16, dim, dtype))


@pytest.mark.parametrize(("page", "tokens"), page_cases())
def test_equals_plain_attention_at_every_length(page: int, tokens: int) -> None:
    """One request, lengths around a page boundary (edge case 3): what lies beyond the last token has no influence."""
    _check(make(1, 2, 3, 64, seed=1), _Frames([tokens], 2, page, 64))


@pytest.mark.parametrize("page", [8, 64])
def test_a_batch_equals_its_requests_alone(page: int) -> None:
    """Lengths differ by pages, and the padding of the shorter ones is the dummy frame."""
    made = _Frames([1, page - 1, page, page + 1, 4 * page + 3], 2, page, 64)
    q = make(5, 2, 4, 64, seed=1)
    together = attend_frames(q, made.k, made.v, made.table, made.tokens, 0.125)
    for b in range(5):
        pages = -(-int(made.tokens[b]) // page)
        alone = attend_frames(q[b : b + 1], made.k, made.v, made.table[b : b + 1, :, :pages], made.tokens[b : b + 1], 0.125)
        torch.testing.assert_close(together[b : b + 1], alone, rtol=1e-5, atol=1e-6)


def test_frames_of_nobody_are_not_read() -> None:
    """Every frame that no row names may hold NaN."""
    made = _Frames([20, 9], 2, 8, 64)
    k, v = torch.cat((made.k, torch.full_like(made.k, float("nan")))), torch.cat((made.v, torch.full_like(made.v, float("nan"))))
    q = make(2, 2, 3, 64, seed=1)
    assert torch.equal(
        attend_frames(q, k, v, made.table, made.tokens, 0.125), attend_frames(q, made.k, made.v, made.table, made.tokens, 0.125)
    )


def test_union_of_sink_window_and_top_counts_each_page_once() -> None:
    """Sink {0}, window {5, 6}, the best pages 0, 5 and 3: attention is over {0, 3, 5, 6} (edge case 6)."""
    page = 8
    keys, values, q = make(7 * page, 64, seed=1), make(7 * page, 64, seed=2), make(1, 1, 4, 64, seed=3)
    scores = torch.tensor([[[9.0, 1.0, 0.0, 7.0, 2.0, 8.0, 3.0]]])
    pages = select_pages(scores, [PageSpan(pages=7, sink=1, window_first=5, chosen=1)])
    assert pages.tolist() == [[[0, 3, 5, 6]]]
    frames = torch.from_numpy(pages.astype("int64"))
    got = attend_frames(q, keys.view(7, page, 64), values.view(7, page, 64), frames, torch.tensor([4 * page]), 0.125)
    live = torch.cat([torch.arange(p * page, (p + 1) * page) for p in (0, 3, 5, 6)])
    for g in range(4):
        want, _ = plain_attention(q[0, 0, g], keys[live], values[live], 0.125)
        torch.testing.assert_close(got[0, 0, g].double(), want, rtol=2e-5, atol=2e-5)
