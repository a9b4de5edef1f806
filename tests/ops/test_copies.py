"""Copies between the tiers: exactly the targets are written, with exactly the source's bits."""

from __future__ import annotations

import pytest
import torch
from sparse_ops import append_token, gather_pages, gather_prefix, store_tokens

from tests.ops.cases import DIMS, DTYPES, PAGES, make, page_cases, poisoned

HEADS = 3


def _slots(tokens: int, page: int, pages: list[int], first: int = 0) -> torch.Tensor:
    """Logical slots of ``tokens`` consecutive tokens from place ``first`` of a request whose home pages are ``pages``."""
    at = torch.arange(first, first + tokens)
    return torch.tensor(pages)[at // page] * page + at % page


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page", "tokens"), page_cases())
def test_store_writes_its_slots_and_no_other(page: int, tokens: int, dtype: torch.dtype) -> None:
    """Home is poisoned: after the call the written slots hold the tokens and every other is still NaN."""
    pages = [5, 2, 7, 1, 6]
    home = poisoned(8, HEADS, 2, page, 64, dtype=dtype)
    slots = _slots(tokens, page, pages)
    k, v = make(tokens, HEADS, 64, seed=1, dtype=dtype), make(tokens, HEADS, 64, seed=2, dtype=dtype)
    store_tokens(home, slots, k, v)
    written = torch.zeros(8, page, dtype=torch.bool)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(home[slot // page, :, 0, slot % page], k[i])
        assert torch.equal(home[slot // page, :, 1, slot % page], v[i])
        written[slot // page, slot % page] = True
    assert torch.isnan(home.permute(0, 3, 1, 2, 4)[~written]).all()


def test_store_rounds_to_the_type_of_home() -> None:
    """Home in bfloat16, tokens in float32."""
    home = poisoned(2, HEADS, 2, 8, 64, dtype=torch.bfloat16)
    k, v = make(3, HEADS, 64, seed=1), make(3, HEADS, 64, seed=2)
    store_tokens(home, torch.tensor([8, 9, 10]), k, v)
    assert torch.equal(home[1, :, 0, :3], k.bfloat16().transpose(0, 1))
    assert torch.equal(home[1, :, 1, :3], v.bfloat16().transpose(0, 1))


@pytest.mark.parametrize(("page", "tokens"), page_cases())
def test_prefix_comes_back_as_it_was_stored(page: int, tokens: int) -> None:
    """In token order over scattered pages, cut at the last token; other pages of home are poison."""
    pages = [5, 2, 7, 1, 6][: -(-tokens // page)]
    home = poisoned(8, HEADS, 2, page, 96)
    k, v = make(tokens, HEADS, 96, seed=1), make(tokens, HEADS, 96, seed=2)
    store_tokens(home, _slots(tokens, page, pages), k, v)
    keys, values = gather_prefix(home, torch.tensor(pages), tokens)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_overwrites_exactly_its_frames(dim: int, dtype: torch.dtype) -> None:
    """Each target frame is overwritten whole, poison and all; every other frame keeps its poison."""
    home = make(6, HEADS, 2, 16, dim, seed=1, dtype=dtype)
    k_frames, v_frames = poisoned(9, 16, dim, dtype=dtype), poisoned(9, 16, dim, dtype=dtype)
    pages, heads, frames = torch.tensor([5, 0, 5, 3]), torch.tensor([2, 0, 1, 2]), torch.tensor([8, 1, 4, 2])
    gather_pages(home, pages, heads, k_frames, v_frames, frames)
    for page, head, frame in zip(pages.tolist(), heads.tolist(), frames.tolist(), strict=True):
        assert torch.equal(k_frames[frame], home[page, head, 0])
        assert torch.equal(v_frames[frame], home[page, head, 1])
    rest = [frame for frame in range(9) if frame not in frames.tolist()]
    assert torch.isnan(k_frames[rest]).all()
    assert torch.isnan(v_frames[rest]).all()


@pytest.mark.parametrize("page", PAGES)
def test_gather_of_nothing_writes_nothing(page: int) -> None:
    """A step in which every page was a hit."""
    none = torch.empty(0, dtype=torch.int64)
    k_frames, v_frames = poisoned(3, page, 64), poisoned(3, page, 64)
    gather_pages(make(2, HEADS, 2, page, 64, seed=1), none, none, k_frames, v_frames, none)
    assert torch.isnan(k_frames).all()
    assert torch.isnan(v_frames).all()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_writes_one_place_of_each_frame(page: int, dtype: torch.dtype) -> None:
    """Three requests at the first, a middle and the last place of their open pages."""
    frames = torch.tensor([[1, 5], [2, 7], [6, 3]])
    offsets = torch.tensor([0, page // 2, page - 1])
    k_frames, v_frames = poisoned(9, page, 64, dtype=dtype), poisoned(9, page, 64, dtype=dtype)
    k, v = make(3, 2, 64, seed=1), make(3, 2, 64, seed=2)
    append_token(k_frames, v_frames, frames, offsets, k, v)
    written = torch.zeros(9, page, dtype=torch.bool)
    for b in range(3):
        for h in range(2):
            assert torch.equal(k_frames[frames[b, h], offsets[b]], k[b, h].to(dtype))
            assert torch.equal(v_frames[frames[b, h], offsets[b]], v[b, h].to(dtype))
            written[frames[b, h], offsets[b]] = True
    assert torch.isnan(k_frames[~written]).all()
    assert torch.isnan(v_frames[~written]).all()


def test_layers_do_not_share_a_base() -> None:
    """Layer l writes l into its pages, and gets l back (edge case 14)."""
    homes = [poisoned(4, HEADS, 2, 8, 64) for _ in range(3)]
    for layer, home in enumerate(homes):
        value = torch.full((16, HEADS, 64), float(layer))
        store_tokens(home, _slots(16, 8, [3, 1]), value, value + 0.5)
    for layer, home in enumerate(homes):
        k_frames, v_frames = poisoned(3, 8, 64), poisoned(3, 8, 64)
        gather_pages(home, torch.tensor([3, 1]), torch.tensor([0, 2]), k_frames, v_frames, torch.tensor([2, 0]))
        assert (k_frames[[0, 2]] == layer).all()
        assert (v_frames[[0, 2]] == layer + 0.5).all()


def _huge(*shape: int) -> torch.Tensor:
    """A tensor of more than 2**31 one-byte elements, of which only touched memory is ever real."""
    try:
        return torch.empty(shape, dtype=torch.int8)
    except RuntimeError as error:
        pytest.skip(f"the machine grants no {torch.Size(shape).numel() / 2**30:.1f} GiB of address space: {error}")


def test_the_last_page_is_addressed_with_64_bits() -> None:
    """More than 2**31 elements: a canary goes through home's last page and the last frame, and back (edge case 12)."""
    page, dim = 8, 64
    home = _huge(2**31 // (2 * page * dim) + 2, 1, 2, page, dim)
    assert home.numel() > 2**31
    last = home.shape[0] - 1
    home[last - 1 :] = 1
    k, v = torch.full((3, 1, dim), 77, dtype=torch.int8), torch.full((3, 1, dim), -55, dtype=torch.int8)
    store_tokens(home, last * page + torch.tensor([5, 6, 7]), k, v)
    assert (home[last, 0, 0, 5:] == 77).all()
    assert (home[last, 0, 1, 5:] == -55).all()
    keys, values = gather_prefix(home, torch.tensor([last - 1, last]), 2 * page)
    assert keys[0, :, 0].tolist() == [1] * 13 + [77] * 3
    assert values[0, :, 0].tolist() == [1] * 13 + [-55] * 3

    k_frames, v_frames = (_huge(2**31 // (page * dim) + 2, page, dim) for _ in range(2))
    frame = torch.tensor([k_frames.shape[0] - 1])
    gather_pages(home, torch.tensor([last]), torch.tensor([0]), k_frames, v_frames, frame)
    append_token(k_frames, v_frames, frame[None], torch.tensor([0]), k[:1] + 1, v[:1] + 1)
    assert k_frames[-1, :, 0].tolist() == [78, 1, 1, 1, 1, 77, 77, 77]
    assert v_frames[-1, :, 0].tolist() == [-54, 1, 1, 1, 1, -55, -55, -55]
