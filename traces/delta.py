"""Delta coding of page selections: what a (request, step) attends, as the difference to the request's previous event.

A *key* is one attended page of one row: ``row << shift | page`` with ``row = layer * kv_heads + head``. Keys of an event ascend, which
is row order and inside a row page order, so that both directions are a few passes over the selected pages, without a loop over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traces.schema import WARM, PageSets

Int32s = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]

_DECODE_SHIFT = 32


class Delta(NamedTuple):
    """One row of ``selections.parquet``: counts are ``[rows]``, ids are concatenated by row and ascend inside a row."""

    added_counts: Int32s
    added: Int32s
    removed_counts: Int32s
    removed: Int32s


class DeltaError(ValueError):
    """A selection that can't be coded or a delta that does not apply; ``field`` names the column."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class _Presence:
    """Pages of a request's previous event: a bitmap for look-ups, and its keys to clear it in time of the selection, not of the context."""

    def __init__(self, rows: int, shift: int) -> None:
        self.shift = shift
        self.bits = np.zeros(rows << shift, np.bool_)
        self.keys: Keys = np.empty(0, np.int64)

    def grown(self, rows: int, shift: int) -> _Presence:
        larger = _Presence(rows, shift)
        larger.keys = (self.keys >> self.shift << shift) | (self.keys & ((1 << self.shift) - 1))
        larger.bits[larger.keys] = True
        return larger


class DeltaEncoder:
    """Turns page sets into deltas; holds one bitmap ``[rows, pages]`` a live request.

    Args:
        layers, kv_heads: shape of a selection.
        page_size: tokens a page; bounds the page numbers of a context.
    """

    def __init__(self, layers: int, kv_heads: int, page_size: int) -> None:
        self.shape = (layers, kv_heads)
        self.rows = layers * kv_heads
        self.page_size = page_size
        self._row_ids = np.arange(self.rows, dtype=np.int64)[:, None]
        self._previous: dict[int, _Presence] = {}

    def __len__(self) -> int:
        """Requests whose previous event is held."""
        return len(self._previous)

    def encode(self, request: int, context: int, kind: int, pages: PageSets) -> Delta:
        """Delta of ``pages [layers, kv_heads, S]`` to the previous event of ``request``; a WARM event starts anew.

        Raises:
            DeltaError: on a wrong shape, pages that do not ascend, or a page beyond ``context`` tokens.
        """
        if pages.ndim != 3 or pages.shape[:2] != self.shape:
            raise DeltaError("pages", f"pages of shape {pages.shape}, expected [{self.shape[0]}, {self.shape[1]}, S]")
        flat = pages.reshape(self.rows, -1)
        limit = -(-context // self.page_size)
        if flat.size and int(flat.max()) >= limit:
            raise DeltaError("pages", f"page {flat.max()} is beyond the context of {context} tokens ({limit} pages of {self.page_size})")
        previous = self._previous.get(request)
        shift = max(limit - 1, 1).bit_length()
        if previous is None or kind == WARM:
            previous = _Presence(self.rows, shift)
        elif shift > previous.shift:
            previous = previous.grown(self.rows, shift)
        shift, bits = previous.shift, previous.bits
        keys: Keys = ((self._row_ids << shift) | flat)[flat >= 0]
        if (keys[1:] <= keys[:-1]).any():
            raise DeltaError("pages", "the pages of a row must ascend, without duplicates")
        self._previous[request] = previous
        added = keys.compress(~bits[keys])
        bits[previous.keys] = False
        bits[keys] = True
        removed = previous.keys.compress(~bits[previous.keys])
        previous.keys = keys
        return Delta(*self._split(added, shift), *self._split(removed, shift))

    def drop(self, request: int) -> None:
        """Forget ``request``; unknown ones are ignored."""
        self._previous.pop(request, None)

    def _split(self, keys: Keys, shift: int) -> tuple[Int32s, Int32s]:
        counts = np.bincount(keys >> shift, minlength=self.rows).astype(np.int32)
        return counts, (keys & ((1 << shift) - 1)).astype(np.int32)


class DeltaDecoder:
    """The inverse of :class:`DeltaEncoder`; holds the keys of each live request's previous event."""

    def __init__(self, layers: int, kv_heads: int, page_size: int) -> None:
        self.shape = (layers, kv_heads)
        self.rows = layers * kv_heads
        self.page_size = page_size
        self._row_ids = np.arange(self.rows, dtype=np.int64)
        self._nothing: tuple[Keys, Int32s] = (np.empty(0, np.int64), np.zeros(self.rows, np.int32))
        self._previous: dict[int, tuple[Keys, Int32s]] = {}

    def apply(self, request: int, context: int, kind: int, delta: Delta) -> PageSets:
        """Pages ``[layers, kv_heads, S]`` after ``delta``; S is the longest row.

        Raises:
            DeltaError: if the delta is malformed, removes an absent page, adds a present one, or names a page beyond the context.
        """
        limit = -(-context // self.page_size)
        added = self._keys("added", delta.added_counts, delta.added, limit)
        removed = self._keys("removed", delta.removed_counts, delta.removed, None)
        if kind == WARM and removed.size:
            raise DeltaError("removed", f"a warm event resets the row and removes nothing, found {removed.size} pages")
        before, counts = self._nothing if kind == WARM else self._previous.get(request, self._nothing)
        keys = self._applied(before, removed, added)
        counts = counts + delta.added_counts - delta.removed_counts
        self._previous[request] = (keys, counts)
        width = int(counts.max(initial=0))
        pages = np.full((self.rows, width), -1, np.int32)
        pages[np.arange(width) < counts[:, None]] = keys & ((1 << _DECODE_SHIFT) - 1)
        return pages.reshape(*self.shape, width)

    def drop(self, request: int) -> None:
        """Forget ``request``; unknown ones are ignored."""
        self._previous.pop(request, None)

    def _keys(self, name: str, counts: Int32s, ids: Int32s, limit: int | None) -> Keys:
        if len(counts) != self.rows:
            raise DeltaError(f"{name}_counts", f"expected {self.rows} entries (layers x KV heads), found {len(counts)}")
        if (counts < 0).any():
            raise DeltaError(f"{name}_counts", f"expected numbers >= 0, found {counts.min()}")
        if int(counts.sum(dtype=np.int64)) != len(ids):
            raise DeltaError(name, f"expected {counts.sum(dtype=np.int64)} pages (the sum of {name}_counts), found {len(ids)}")
        if not len(ids):
            return np.empty(0, np.int64)
        if ids.min() < 0:
            raise DeltaError(name, f"expected page numbers >= 0, found {ids.min()}")
        if limit is not None and ids.max() >= limit:
            raise DeltaError(name, f"page {ids.max()} is beyond the context ({limit} pages)")
        keys: Keys = np.repeat(self._row_ids, counts) << _DECODE_SHIFT | ids
        descending = keys[1:] <= keys[:-1]
        if descending.any():
            at = int(np.argmax(descending))
            raise DeltaError(name, f"expected ascending pages inside a row, found {ids[at + 1]} after {ids[at]}")
        return keys

    def _where(self, key: np.int64) -> str:
        layer, head = divmod(int(key) >> _DECODE_SHIFT, self.shape[1])
        return f"page {int(key) & ((1 << _DECODE_SHIFT) - 1)} of layer {layer}, KV head {head}"

    def _applied(self, before: Keys, removed: Keys, added: Keys) -> Keys:
        if not removed.size and not added.size:
            return before
        # One merge of three sorted runs, tagged so that equal keys stand as before, removed, added.
        merged = np.concatenate([before << 2, removed << 2 | 1, added << 2 | 2])
        merged.sort(kind="stable")
        twice = np.flatnonzero((merged[1:] ^ merged[:-1]) < 4) + 1
        if len(twice) != len(removed) or ((merged[twice] & 3) != 1).any():
            absent = np.setdiff1d(removed, before, assume_unique=True)
            if absent.size:
                raise DeltaError("removed", f"{self._where(absent[0])} is removed but was not attended before")
            raise DeltaError("added", f"{self._where(np.intersect1d(added, before)[0])} is added but is attended already")
        keep = np.ones(len(merged), np.bool_)
        keep[twice] = False
        keep[twice - 1] = False
        keys: Keys = merged.compress(keep) >> 2
        return keys
