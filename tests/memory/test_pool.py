"""The pool that SGLang sees: its sizes, and that nothing but the sparse backend gets at its KV."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


def _make(dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    from sglang_ext.memory.pool import TwoTierPool

    return TwoTierPool(
        size=160, page_size=16, dtype=dtype, head_num=3, head_dim=64, layer_num=2, device="cpu", enable_memory_saver=False, **kwargs
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_home_holds_every_slot_and_the_page_of_padding(dtype: torch.dtype) -> None:
    """160 slots are 10 pages, page 0 comes on top; SGLang is told the bytes that home really takes."""
    pool = _make(dtype)
    assert pool.pages == 11
    assert [tuple(layer.shape) for layer in pool.home.kv] == [(11, 3, 2, 16, 64)] * 2
    assert sum(pool.get_kv_size_bytes()) == pool.home.nbytes == 2 * 11 * 16 * 3 * 64 * 2 * dtype.itemsize


def test_stock_ways_to_the_kv_are_refused() -> None:
    """A stock backend, disaggregation, speculation or HiCache on this pool would read nothing: they raise instead."""
    pool, none = _make(), torch.empty(0, dtype=torch.int64)
    for call in (
        lambda: pool.get_key_buffer(0),
        lambda: pool.get_value_buffer(0),
        lambda: pool.get_kv_buffer(0),
        lambda: pool.set_kv_buffer(None, none, none, none),
        lambda: pool.move_kv_cache(none, none),
        lambda: pool.get_contiguous_buf_infos(),
        lambda: pool.get_cpu_copy(none),
    ):
        with pytest.raises(RuntimeError, match="of the two-tier pool was asked for"):
            call()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_kv_is_refused(dtype: torch.dtype) -> None:
    """A checkpoint may ask for it without any flag: stored as bytes without scales it would be fluent garbage (edge case 22)."""
    with pytest.raises(ValueError, match=r"KV of type torch\.float8\w+ is not supported.*--kv-cache-dtype"):
        _make(dtype)


def test_values_of_another_width_are_refused() -> None:
    """Home keeps K and V side by side."""
    with pytest.raises(ValueError, match=r"head_dim\(=64\) and v_head_dim\(=32\)"):
        _make(v_head_dim=32)
