"""The device tier: frames, their free list, and the rows of every layer that own them.

A frame holds one page of one KV head of one layer. A row (request, KV head) of a layer owns as many frames as its request's plan
says; slot ``i`` of the row is its ``i``-th frame. Which page lies in which slot is the policy's (``BucketedLRU``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.memory.tables import TwoLevelTable
from sglang_ext.policy import BucketedLRU, RowPlan

DUMMY = 0
"""Frame that no row owns: padding reads it, so it stays zero."""


class FramePool:
    """K and V frames ``[total + 1, P, D]`` and the stack of free ones; frame 0 is the dummy.

    Invariant: free + owned = total, a frame has one owner or is free.
    """

    def __init__(self, total: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.total = total
        self.k = torch.zeros((total + 1, page_size, head_dim), dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self._free = np.arange(total, 0, -1, dtype=np.int32)
        self._top = total

    @property
    def free(self) -> int:
        """Frames that nobody owns."""
        return self._top

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return int(self.k.nbytes + self.v.nbytes)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """``count`` frames. Raises ``RuntimeError`` when there are fewer (the ledger admitted too much)."""
        if count > self._top:
            raise RuntimeError(f"{count} frames wanted, {self._top} of {self.total} free")
        self._top -= count
        return self._free[self._top : self._top + count].copy()

    def give(self, frames: npt.NDArray[np.int32]) -> None:
        """Take ``frames`` back."""
        self._free[self._top : self._top + len(frames)] = frames
        self._top += len(frames)

    def free_frames(self) -> npt.NDArray[np.int32]:
        """The free frames, for checks."""
        return self._free[: self._top].copy()


class LayerRows:
    """Rows of one layer: frames by slot, and the policy's state. Row number = request slot x KV heads + KV head."""

    def __init__(self, requests: int, kv_heads: int, capacity: int, pages: int) -> None:
        self.kv_heads = kv_heads
        rows = requests * kv_heads
        self.frames = np.zeros((rows, capacity), np.int32)
        self.table = TwoLevelTable(rows, pages)
        self.lru = BucketedLRU(rows, capacity, self.table)

    def rows_of(self, request_slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row numbers ``[B * H]`` of requests ``[B]``."""
        return (request_slots[:, None] * self.kv_heads + np.arange(self.kv_heads)).reshape(-1)


class DeviceTier:
    """All frames and rows of a rank."""

    def __init__(self, pool: FramePool, requests: int, kv_heads: int, capacity: Sequence[int], pages: int) -> None:
        self.pool = pool
        self.kv_heads = kv_heads
        self.layers = [LayerRows(requests, kv_heads, most, pages) for most in capacity]
        self._open: dict[int, tuple[int, ...]] = {}

    def open(self, request_slot: int, plan: RowPlan) -> None:
        """Give the rows of a request their (empty) frames. Raises ``RuntimeError`` if they are open already or frames lack."""
        if request_slot in self._open:
            raise RuntimeError(f"rows of request slot {request_slot} are open already")
        if plan.frames > self.pool.free:  # before the first layer takes any
            raise RuntimeError(f"{plan.frames} frames wanted, {self.pool.free} of {self.pool.total} free")
        slots = np.array([request_slot])
        for layer, capacity in zip(self.layers, plan.capacity, strict=True):
            rows = layer.rows_of(slots)
            layer.frames[rows, :capacity] = self.pool.take(capacity * self.kv_heads).reshape(self.kv_heads, capacity)
            layer.lru.open(rows, capacity)
        self._open[request_slot] = plan.capacity

    def is_open(self, request_slot: int) -> bool:
        """Whether the rows of the request own frames."""
        return request_slot in self._open

    def close(self, request_slot: int) -> None:
        """Take all frames of a request back; a slot that is not open is ignored."""
        capacities = self._open.pop(request_slot, None)
        if capacities is None:
            return
        slots = np.array([request_slot])
        for layer, capacity in zip(self.layers, capacities, strict=True):
            rows = layer.rows_of(slots)
            self.pool.give(layer.frames[rows, :capacity].reshape(-1))
            layer.frames[rows] = DUMMY
            layer.lru.close(rows)

    @property
    def used(self) -> int:
        """Frames owned by rows."""
        return self.pool.total - self.pool.free

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless frames have one owner each, free + owned = all, and every row's tables agree."""
        owned: list[npt.NDArray[np.int32]] = [self.pool.free_frames()]
        for number, layer in enumerate(self.layers):
            layer.lru.check_integrity()
            layer.table.check_integrity()
            for slot, capacities in self._open.items():
                owned.append(layer.frames[layer.rows_of(np.array([slot])), : capacities[number]].reshape(-1))
        everything = np.sort(np.concatenate(owned))
        if not np.array_equal(everything, np.arange(1, self.pool.total + 1)):
            raise RuntimeError(f"frames: {len(everything)} free or owned, {len(np.unique(everything))} distinct, {self.pool.total} exist")
        if torch.count_nonzero(self.pool.k[DUMMY]) or torch.count_nonzero(self.pool.v[DUMMY]):
            raise RuntimeError("the dummy frame was written")
