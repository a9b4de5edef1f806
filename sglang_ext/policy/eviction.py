"""Bucketed LRU: which frames of a row are given up for the pages that a step misses (SPIN section 5.4).

Stamps count decode steps of the row's own request and live in ``[0, 64)``; no sorting by time is kept:

1. classify: selected pages are hits (they have a slot) or misses;
2. stamp: hits get ``min(step, 63)``; once ``step > 63`` hits stay at 63 and every other slot is decremented by one, floor 0;
3. evict: free slots first, then the oldest stamps, only as many as the misses need, never a page of this step;
4. admit: the missed pages take those slots with the current stamp.

Inside one stamp the lowest slot goes first, so that the outcome is deterministic. One call handles many rows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

STAMPS = 64
_PROTECTED = np.int16(STAMPS + 1)


class PageTable(Protocol):
    """Page -> slot of every row; -1 is absent."""

    def get(self, rows: npt.NDArray[np.int64], pages: IntArray) -> IntArray:
        """Slots ``[R, S]`` of ``pages [R, S]`` (entries < 0 give -1)."""

    def put(self, rows: npt.NDArray[np.int64], pages: IntArray, slots: IntArray) -> None:
        """Set flat ``rows [N]``, ``pages [N]`` to ``slots [N]``; -1 removes."""

    def drop(self, rows: npt.NDArray[np.int64]) -> None:
        """Forget every page of ``rows``."""


class FlatPageTable:
    """The plain table ``[rows, pages]``: the reference of the two-level one, and the simulator's own."""

    def __init__(self, rows: int, pages: int) -> None:
        self._slots = np.full((rows, pages), -1, np.int32)

    def get(self, rows: npt.NDArray[np.int64], pages: IntArray) -> IntArray:
        """See :class:`PageTable`."""
        found: IntArray = self._slots[rows[:, None], np.maximum(pages, 0)]
        return np.where(pages >= 0, found, np.int32(-1))

    def put(self, rows: npt.NDArray[np.int64], pages: IntArray, slots: IntArray) -> None:
        """See :class:`PageTable`."""
        self._slots[rows, pages] = slots

    def drop(self, rows: npt.NDArray[np.int64]) -> None:
        """See :class:`PageTable`."""
        self._slots[rows] = -1


class Access(NamedTuple):
    """What one step did to the rows' slots.

    ``slots [R, S]``: where each selected page lies now (-1 for padding). ``hit``, ``miss``, ``born [R, S]``: had a slot before; must
    cross the link; began in this step and is written in place.
    """

    slots: IntArray
    hit: BoolArray
    miss: BoolArray
    born: BoolArray


class BucketedLRU:
    """Slots of ``rows`` rows, each with up to ``capacity`` slots.

    Args:
        rows: rows that may be open at once.
        capacity: most slots a row can have.
        table: page -> slot; :class:`FlatPageTable` or the serving side's two-level table.

    Invariants (``check_integrity``): page -> slot and slot -> page are inverse; slots beyond a row's limit are never used.
    """

    def __init__(self, rows: int, capacity: int, table: PageTable) -> None:
        self.capacity = capacity
        self.page = np.full((rows, capacity), -1, np.int32)
        self.stamp = np.zeros((rows, capacity), np.uint8)
        self.limit = np.zeros(rows, np.int32)
        self.clock = np.zeros(rows, np.int64)
        self.table = table
        self._slot_ids = np.arange(capacity, dtype=np.int32)

    def open(self, rows: npt.NDArray[np.int64], limit: int) -> None:
        """Give ``rows`` ``limit`` empty slots each. Raises ``ValueError`` if ``limit`` exceeds the capacity."""
        if not 0 < limit <= self.capacity:
            raise ValueError(f"limit(={limit}) must be in 1..{self.capacity}")
        self.close(rows)
        self.limit[rows] = limit

    def close(self, rows: npt.NDArray[np.int64]) -> None:
        """Forget all that ``rows`` hold."""
        self.table.drop(rows)
        self.page[rows] = -1
        self.stamp[rows] = 0
        self.limit[rows] = 0
        self.clock[rows] = 0

    def warm(self, rows: npt.NDArray[np.int64], pages: IntArray) -> IntArray:
        """Fill empty rows after prefill with ``pages [R, S]`` (-1 pads at the end of a row); returns their slots. No link traffic."""
        fits = (pages >= 0) & (np.cumsum(pages >= 0, axis=1) <= self.limit[rows][:, None])
        slots = np.where(fits, np.cumsum(fits, axis=1, dtype=np.int32) - 1, np.int32(-1)).astype(np.int32)
        self.page[rows] = -1
        self.stamp[rows] = 0
        self.table.drop(rows)
        row_of = np.broadcast_to(rows[:, None], pages.shape)[fits]
        self.page[row_of, slots[fits]] = pages[fits]
        self.table.put(row_of, pages[fits], slots[fits])
        return slots

    def access(self, rows: npt.NDArray[np.int64], pages: IntArray, born: IntArray | None = None) -> Access:
        """One decode step of ``rows [R]`` attending ``pages [R, S]`` (ascending, -1 pads).

        Args:
            rows: distinct row numbers.
            pages: page numbers within the request.
            born: ``[R]`` page that begins in this step (its only token is written in place, nothing crosses the link), or -1.

        Raises:
            RuntimeError: if a row selects more pages than it has slots (the planner gave it too few).
        """
        valid = pages >= 0
        found = self.table.get(rows, pages)
        hit = found >= 0
        absent = valid & ~hit
        self.clock[rows] += 1
        clock = self.clock[rows]
        now = np.minimum(clock, STAMPS - 1).astype(np.uint8)
        stamp = self.stamp[rows]
        aged = clock > STAMPS - 1
        if aged.any():
            stamp[aged] -= stamp[aged] > 0
        local, col = np.nonzero(hit)
        stamp[local, found[local, col]] = now[local]
        slots = found
        need = absent.sum(axis=1)
        if need.any():
            slots = self._replace(rows, pages, found, hit, absent, need, stamp, now)
        self.stamp[rows] = stamp
        is_born = absent & (pages == born[:, None]) if born is not None else np.zeros_like(absent)
        return Access(slots, hit, absent & ~is_born, is_born)

    def _replace(
        self,
        rows: npt.NDArray[np.int64],
        pages: IntArray,
        found: IntArray,
        hit: BoolArray,
        absent: BoolArray,
        need: npt.NDArray[np.int64],
        stamp: npt.NDArray[np.uint8],
        now: npt.NDArray[np.uint8],
    ) -> IntArray:
        page = self.page[rows]
        key = np.where(page < 0, np.int16(-1), stamp.astype(np.int16))
        local, col = np.nonzero(hit)
        key[local, found[local, col]] = _PROTECTED
        key[self._slot_ids[None, :] >= self.limit[rows][:, None]] = _PROTECTED
        usable = (key < _PROTECTED).sum(axis=1)
        if (need > usable).any():
            worst = int(np.argmax(need - usable))
            raise RuntimeError(
                f"row {rows[worst]} misses {need[worst]} pages but only {usable[worst]} of its {self.limit[rows[worst]]} slots may be given up"
            )
        # Stable: inside one stamp the lowest slot goes first.
        victims = np.argsort(key, axis=1, kind="stable")[:, : int(need.max())].astype(np.int32)
        taken = np.arange(victims.shape[1])[None, :] < need[:, None]
        v_local = np.nonzero(taken)[0]
        v_slot = victims[taken]
        old = page[v_local, v_slot]
        evicted = old >= 0
        self.table.put(rows[v_local[evicted]], old[evicted], np.full(int(evicted.sum()), -1, np.int32))
        m_local, m_col = np.nonzero(absent)  # row-major, as `taken` is: the k-th miss of a row takes its k-th victim
        slots = found.copy()
        slots[m_local, m_col] = v_slot
        new = pages[m_local, m_col]
        page[m_local, v_slot] = new
        stamp[m_local, v_slot] = now[m_local]
        self.page[rows] = page
        self.table.put(rows[m_local], new, v_slot)
        return slots

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless page -> slot and slot -> page are inverse and within the limits."""
        row, slot = np.nonzero(self.page >= 0)
        if (slot >= self.limit[row]).any():
            raise RuntimeError("a slot beyond its row's limit holds a page")
        back = self.table.get(row.astype(np.int64), self.page[row, slot][:, None])[:, 0]
        if (back != slot).any():
            bad = int(np.argmax(back != slot))
            raise RuntimeError(f"row {row[bad]}: page {self.page[row[bad], slot[bad]]} is in slot {slot[bad]} but the table says {back[bad]}")
