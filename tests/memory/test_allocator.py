"""The CPU platform's allocator against a plain model of SGLang's: the same slots, in the same order."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

PAGE = 8
Make = Callable[[int], Any]


@pytest.fixture(scope="module")
def make() -> Make:
    """Allocator of so many pages; importing SGLang takes a while, so only where a test needs it."""
    from sglang_ext.memory.allocator import TorchPagedAllocator

    return lambda pages: TorchPagedAllocator(pages * PAGE, PAGE, torch.float32, "cpu", None, False)


class _Model:
    """Requests as lists of slots, and the free pages first in, first out; what is given back goes to the front."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(1, pages + 1))
        self.slots: list[list[int]] = []

    def grow(self, counts: list[int]) -> list[int] | None:
        """``counts[i]`` more slots for request i, or ``None`` and nothing changed."""
        free = list(self.free)
        grown = []
        for slots, count in zip(self.slots, counts, strict=True):
            new: list[int] = []
            for place in range(len(slots), len(slots) + count):
                if place % PAGE == 0:
                    if not free:
                        return None
                    new.append(free.pop(0) * PAGE)
                else:
                    new.append((new or slots)[-1] + 1)
            grown.append(new)
        self.free = free
        for slots, new in zip(self.slots, grown, strict=True):
            slots.extend(new)
        return [slot for new in grown for slot in new]


def _lengths(model: _Model) -> torch.Tensor:
    return torch.tensor([len(slots) for slots in model.slots], dtype=torch.int64)


def _last(model: _Model) -> torch.Tensor:
    return torch.tensor([slots[-1] if slots else -1 for slots in model.slots], dtype=torch.int64)


def _extend(allocator: Any, model: _Model, counts: list[int]) -> None:
    before, last = _lengths(model), _last(model)
    after = before + torch.tensor(counts)
    free = allocator.free_pages.clone()
    got = allocator.alloc_extend(before, before, after, after, last, sum(counts))
    _compare(allocator, free, got, model.grow(counts))


def _decode(allocator: Any, model: _Model) -> None:
    after, last = _lengths(model) + 1, _last(model)
    free = allocator.free_pages.clone()
    got = allocator.alloc_decode(after, after, last)
    _compare(allocator, free, got, model.grow([1] * len(model.slots)))


def _compare(allocator: Any, free: torch.Tensor, got: torch.Tensor | None, want: list[int] | None) -> None:
    assert (got is None) == (want is None)
    if got is None:
        assert torch.equal(allocator.free_pages, free)  # nothing lost
    else:
        assert got.dtype == torch.int64
        assert got.tolist() == want


_GROWTH = st.lists(st.one_of(st.just("decode"), st.just("free"), st.lists(st.integers(1, 3 * PAGE), min_size=3, max_size=3)), max_size=15)


@settings(max_examples=100, deadline=None)
@given(moves=_GROWTH, pages=st.sampled_from([6, 40]))
def test_hands_out_the_slots_of_the_model(make: Make, moves: list[str | list[int]], pages: int) -> None:
    """Three requests that prefill, decode and end, in a pool that runs out (6 pages) and in one that mostly does not."""
    allocator, model = make(pages), _Model(pages)
    model.slots = [[], [], []]
    for move in moves:
        if move == "decode":
            if all(model.slots):
                _decode(allocator, model)
        elif move == "free":
            slots = model.slots.pop(0)
            allocator.free(torch.tensor(slots, dtype=torch.int64))
            model.free = sorted({slot // PAGE for slot in slots}) + model.free
            model.slots.append([])
        else:
            assert isinstance(move, list)
            _extend(allocator, model, move)
        held = [slot for slots in model.slots for slot in slots]
        assert len(set(held)) == len(held)
        assert all(slot >= PAGE for slot in held)  # page 0 takes the writes of padding
        assert all(slots[i] % PAGE == i % PAGE for slots in model.slots for i in range(len(slots)))
        assert allocator.available_size() == len(model.free) * PAGE
        assert allocator.free_pages.tolist() == model.free


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_the_last_page_can_be_had_and_no_more(make: Make, tokens: int) -> None:
    """Exactly enough pages: given. One too few: ``None``, and the pages are still there."""
    pages = -(-tokens // PAGE)
    zero, length, none = torch.tensor([0]), torch.tensor([tokens]), torch.tensor([-1])
    short = make(pages - 1)
    assert short.alloc_extend(zero, zero, length, length, none, tokens) is None
    assert short.available_size() == (pages - 1) * PAGE
    allocator = make(pages)
    got = allocator.alloc_extend(zero, zero, length, length, none, tokens)
    assert got.tolist() == list(range(PAGE, PAGE + tokens))
    assert allocator.available_size() == 0
    full = torch.tensor([pages * PAGE + 1])
    assert allocator.alloc_decode(full, full, torch.tensor([pages * PAGE + PAGE - 1])) is None
    allocator.free(got)
    assert sorted(allocator.free_pages.tolist()) == list(range(1, pages + 1))
