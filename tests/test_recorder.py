"""The recorder's pure parts: hashes that show equal prefixes and nothing else, and selections of layers packed into one array."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

PAGE = 16
SALT = b"0123456789abcdef"


def page_hashes(tokens: list[int], page_size: int = PAGE, salt: bytes = SALT) -> tuple[str, ...]:
    """As the recorder makes them; importing it needs torch."""
    from sglang_ext.recorder import page_hashes as made

    return made(tokens, page_size, salt)


def _pack(layers: list[Any]) -> Any:
    from sglang_ext.recorder import _pack as made

    return made(layers)


@settings(max_examples=100, deadline=None)
@given(
    prefix=st.lists(st.integers(0, 200_000), max_size=70), a=st.lists(st.integers(0, 9), max_size=40), b=st.lists(st.integers(0, 9), max_size=40)
)
def test_equal_prefixes_have_equal_hashes_and_no_more(prefix: list[int], a: list[int], b: list[int]) -> None:
    """Two requests agree exactly in the pages before their first different token."""
    one, other = prefix + a, prefix + b
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    first, second = page_hashes(one), page_hashes(other)
    same = [x == y for x, y in zip(first, second, strict=False)]
    full = min(common // PAGE, len(same))
    assert same == [True] * full + [False] * (len(same) - full)


@pytest.mark.parametrize("page", [8, 16, 64])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_partial_page_has_no_hash(page: int, over: int) -> None:
    """Radix prefixes are whole pages; nothing at all for a prompt below one."""
    tokens = list(range(2 * page + over))
    assert len(page_hashes(tokens, page)) == (1 if over < 0 else 2)
    assert page_hashes(tokens[: page - 1], page) == ()
    assert page_hashes([], page) == ()


def test_growing_a_request_keeps_the_hashes_it_had() -> None:
    """A follow-up turn begins with the pages of the one before."""
    tokens = list(range(100))
    assert page_hashes(tokens)[:3] == page_hashes(tokens[:50])


def test_hashes_are_chained() -> None:
    """The same page content after another prefix is another page, as its KV is; also repeated within a request."""
    page = list(range(PAGE))
    first, second = page_hashes(page + page)
    assert first != second
    assert page_hashes([7] * PAGE + page)[1] != second


def test_another_salt_gives_other_hashes() -> None:
    """Nobody can look a guessed prompt up: the salt is thrown away with the run. 16 hexadecimal digits, as the trace format says."""
    tokens = list(range(5 * PAGE))
    mine, other = page_hashes(tokens), page_hashes(tokens, salt=b"another salt")
    assert not set(mine) & set(other)
    assert all(len(one) == 16 and set(one) <= set("0123456789abcdef") for one in mine)
    assert mine == page_hashes(tokens)


def test_layers_of_one_width_are_stacked() -> None:
    """``[B, H, S]`` a layer to ``[L, B, H, S]``."""
    layers = [np.arange(12, dtype=np.int32).reshape(2, 3, 2) + layer for layer in range(3)]
    packed = _pack(layers)
    assert packed.dtype == np.int32
    assert np.array_equal(packed, np.stack(layers))


@settings(max_examples=50, deadline=None)
@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=4), batch=st.integers(1, 3), heads=st.integers(1, 3))
def test_dense_layers_select_more_and_the_others_are_padded(widths: list[int], batch: int, heads: int) -> None:
    """Every layer's pages are where they were; -1 follows."""
    layers = [np.random.default_rng(i).integers(0, 99, (batch, heads, width), dtype=np.int32) for i, width in enumerate(widths)]
    packed = _pack(layers)
    assert packed.shape == (len(widths), batch, heads, max(widths))
    assert packed.dtype == np.int32
    for layer, width in enumerate(widths):
        assert np.array_equal(packed[layer, ..., :width], layers[layer])
        assert (packed[layer, ..., width:] == -1).all()
