"""Page -> slot of every row as a two-level table: a small directory, segments on demand from one shared pool (SPIN section 5.5).

A flat table would need ``rows x (context / page)`` entries for the longest context that any request may have. A row holds few
pages at a time, so that most of its directory stays empty.

    directory [rows, pages / SEGMENT]   segment number, or -1
    segments  [pool, SEGMENT]           slot of each page, or -1
    bitmap    [pool]                    segment in use
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
RowArray = npt.NDArray[np.int64]

SEGMENT = 32
"""Pages a segment covers."""


class TwoLevelTable:
    """See :class:`sglang_ext.policy.PageTable` for the contract.

    Args:
        rows: rows that may be open at once.
        pages: most pages a row can have.
        segments: size of the shared pool; ``None`` gives what all rows together can ever need.
    """

    def __init__(self, rows: int, pages: int, segments: int | None = None) -> None:
        self.directory = np.full((rows, -(-pages // SEGMENT)), -1, np.int32)
        pool = self.directory.size if segments is None else segments
        # A row never has more slots than pages; 2 bytes hold a slot of all but the longest contexts.
        self.segments = np.full((pool, SEGMENT), -1, np.int16 if pages <= np.iinfo(np.int16).max else np.int32)
        self.in_use = np.zeros(pool, np.bool_)
        self._live = np.zeros(pool, np.int32)  # entries set, a segment

    @property
    def nbytes(self) -> int:
        """Bytes of directory, bitmap and the segments in use."""
        return int(self.directory.nbytes + self.in_use.size // 8 + self.in_use.sum() * self.segments.itemsize * SEGMENT)

    def get(self, rows: RowArray, pages: IntArray) -> IntArray:
        """Slots ``[R, S]`` of ``pages [R, S]``; -1 for absent and for padding."""
        clipped = np.maximum(pages, 0)
        segment = self.directory[rows[:, None], clipped // SEGMENT]
        slot = self.segments[np.maximum(segment, 0), clipped % SEGMENT].astype(np.int32)
        return np.where((segment >= 0) & (pages >= 0), slot, np.int32(-1))

    def put(self, rows: RowArray, pages: IntArray, slots: IntArray) -> None:
        """Set flat ``(rows, pages)`` (distinct) to ``slots``; -1 removes. Raises ``RuntimeError`` when the segment pool is exhausted."""
        if not len(rows):
            return
        place = pages // SEGMENT
        segment = self.directory[rows, place]
        wanted = (segment < 0) & (slots >= 0)
        if wanted.any():
            key = np.unique(rows[wanted] * self.directory.shape[1] + place[wanted])
            free = np.flatnonzero(~self.in_use)[: len(key)]
            if len(free) < len(key):
                raise RuntimeError(f"segment pool exhausted: {len(key)} wanted, {len(free)} of {len(self.in_use)} free")
            self.directory.reshape(-1)[key] = free
            self.in_use[free] = True
            segment = self.directory[rows, place]
        known = segment >= 0
        segment, page, slot = segment[known], pages[known] % SEGMENT, slots[known]
        before = self.segments[segment, page] >= 0
        self.segments[segment, page] = slot
        change = (slot >= 0).astype(np.int32) - before.astype(np.int32)
        np.add.at(self._live, segment, change)
        emptied = np.unique(segment[self._live[segment] == 0])
        if len(emptied):
            self.in_use[emptied] = False
            gone = np.isin(self.directory[rows[known], place[known]], emptied)
            self.directory[rows[known][gone], place[known][gone]] = -1

    def drop(self, rows: RowArray) -> None:
        """Forget every page of ``rows`` and give their segments back."""
        held = self.directory[rows]
        held = held[held >= 0]
        self.segments[held] = -1
        self.in_use[held] = False
        self._live[held] = 0
        self.directory[rows] = -1

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless every used segment has one owner and counts its entries rightly."""
        owned = self.directory[self.directory >= 0]
        if len(owned) != len(np.unique(owned)) or set(owned.tolist()) != set(np.flatnonzero(self.in_use).tolist()):
            raise RuntimeError(f"segments: {len(owned)} owned, {int(self.in_use.sum())} in use")
        live = (self.segments >= 0).sum(axis=1)
        if (live != self._live).any() or live[~self.in_use].any() or (live[self.in_use] == 0).any():
            raise RuntimeError("segment entry counts are wrong")
