"""Home's layout and sizes, and the bytes counted on the link."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.memory.home import CLASSES, Home, LinkCounters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layers", "pages", "heads", "page", "dim"), [(1, 1, 1, 8, 64), (3, 5, 4, 16, 96), (2, 7, 3, 64, 106)])
def test_sizes_are_those_of_the_tensors(layers: int, pages: int, heads: int, page: int, dim: int, dtype: torch.dtype) -> None:
    """Bytes of a head page and of a token, as the link counts them, add up to the tier."""
    home = Home(layers, pages, heads, page, dim, dtype, pin=False)
    assert len(home.kv) == layers
    assert all(layer.shape == (pages, heads, 2, page, dim) and layer.dtype == dtype for layer in home.kv)
    assert home.head_page_bytes == home.kv[0][0, 0].nbytes
    assert home.token_bytes == home.kv[0][0, :, :, 0].nbytes
    assert home.nbytes == layers * pages * heads * home.head_page_bytes == layers * pages * page * home.token_bytes
    assert len({layer.data_ptr() for layer in home.kv}) == layers


def test_link_counts_by_class_layer_and_step() -> None:
    """A step's bytes go to their class and layer; the next step begins at zero; totals go on."""
    link = LinkCounters(2)
    link.add("demand", 1, 10)
    link.add("demand", 1, 5)
    link.add("write", 0, 7)
    assert link.take_step() == {"demand": [0, 15], "prefix": [0, 0], "write": [7, 0]}
    link.add("prefix", 0, 3)
    assert link.take_step() == {"demand": [0, 0], "prefix": [3, 0], "write": [0, 0]}
    assert link.take_step() == {name: [0, 0] for name in CLASSES}
    assert link.total == {"demand": 15, "prefix": 3, "write": 7}


def test_a_taken_step_does_not_change_any_more() -> None:
    """The recorder keeps what it took while the next step counts."""
    link = LinkCounters(1)
    taken = link.take_step()
    link.add("write", 0, 1)
    assert taken["write"] == [0]


def test_an_unknown_class_is_not_counted_silently() -> None:
    """A typo must not vanish into a counter nobody reads."""
    with pytest.raises(KeyError):
        LinkCounters(1).add("prefetch", 0, 1)
