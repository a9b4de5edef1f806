"""Home: the complete KV of every live page in host memory, and the link that everything to and from it crosses.

On the CPU platform the two tiers are separate buffers too, and every byte between them is counted, so that all logic is tested as it
will run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

CLASSES = ("demand", "prefix", "write")
"""Link traffic: misses of a decode step and pages of a prefix (host to device); new tokens (device to host)."""


@dataclass
class LinkCounters:
    """Bytes across the link, by class and layer; ``step`` is since the last :meth:`take_step`, ``total`` since the start."""

    layers: int
    step: dict[str, list[int]] = field(init=False)
    total: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.step = {name: [0] * self.layers for name in CLASSES}
        self.total = dict.fromkeys(CLASSES, 0)

    def add(self, name: str, layer: int, nbytes: int) -> None:
        """Count ``nbytes`` of class ``name``."""
        self.step[name][layer] += nbytes
        self.total[name] += nbytes

    def reset(self) -> None:
        """Count from zero again."""
        self.__post_init__()

    def take_step(self) -> dict[str, list[int]]:
        """Bytes by class and layer since the last call."""
        done = self.step
        self.step = {name: [0] * self.layers for name in CLASSES}
        return done


class Home:
    """``kv[layer]``: ``[pages, H, 2, P, D]``, K and V of a page of one head side by side. Page 0 takes the writes of padding."""

    def __init__(self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, *, pin: bool) -> None:
        self.kv = [torch.zeros((pages, kv_heads, 2, page_size, head_dim), dtype=dtype, pin_memory=pin) for _ in range(layers)]
        self.link = LinkCounters(layers)
        self.head_page_bytes = 2 * page_size * head_dim * dtype.itemsize
        self.token_bytes = 2 * kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Host bytes."""
        return sum(int(layer.nbytes) for layer in self.kv)
