"""Bucketed LRU against two plain references: exact LRU, and the four steps of its docstring taken literally, a row at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.policy import Access, BucketedLRU, FlatPageTable
from sglang_ext.policy.eviction import STAMPS, IntArray


def _rows(*rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, np.int64)


def _make_lru(limits: list[int], pages: int = 64, capacity: int | None = None) -> BucketedLRU:
    lru = BucketedLRU(len(limits), capacity or max(limits), FlatPageTable(len(limits), pages))
    for row, limit in enumerate(limits):
        lru.open(_rows(row), limit)
    return lru


def _pad(selections: list[list[int]]) -> IntArray:
    width = max(map(len, selections))
    return np.array([sorted(pages) + [-1] * (width - len(pages)) for pages in selections], np.int32)


def _held(lru: BucketedLRU, row: int) -> dict[int, int]:
    """Page -> slot of a row."""
    return {int(page): slot for slot, page in enumerate(lru.page[row]) if page >= 0}


def _check(lru: BucketedLRU) -> None:
    """Integrity, and also that the table knows no page beyond those in slots."""
    lru.check_integrity()
    assert isinstance(lru.table, FlatPageTable)
    assert (lru.table._slots >= 0).sum() == (lru.page >= 0).sum()


class Outcome(NamedTuple):
    slots: list[int]
    hits: list[int]
    misses: list[int]
    born: list[int]


class LiteralRow:
    """One row, one page at a time: the four steps as the docstring has them."""

    def __init__(self, limit: int) -> None:
        self.page: list[int | None] = [None] * limit
        self.stamp = [0] * limit
        self.step = 0

    def warm(self, pages: list[int]) -> None:
        for slot, page in enumerate(pages[: len(self.page)]):
            self.page[slot] = page

    def access(self, pages: list[int], born: int) -> Outcome:
        self.step += 1
        # 1 classify
        hits = [page for page in pages if page in self.page]
        absent = [page for page in pages if page not in self.page]
        # 2 stamp
        for slot, page in enumerate(self.page):
            if page in hits:
                self.stamp[slot] = min(self.step, 63)
            elif self.step > 63:
                self.stamp[slot] = max(self.stamp[slot] - 1, 0)
        # 3 evict: free slots, then the oldest stamps, lowest slot first, never a page of this step
        free = [slot for slot, page in enumerate(self.page) if page is None]
        old = sorted((self.stamp[slot], slot) for slot, page in enumerate(self.page) if page is not None and page not in hits)
        places = (free + [slot for _, slot in old])[: len(absent)]
        # 4 admit
        for page, slot in zip(absent, places, strict=True):
            self.page[slot] = page
            self.stamp[slot] = min(self.step, 63)
        misses = [page for page in absent if page != born]
        return Outcome([self.page.index(page) for page in pages], hits, misses, [page for page in absent if page == born])


def _outcome(access: Access, pages: IntArray, at: int) -> Outcome:
    valid = pages[at] >= 0
    assert not (access.hit[at] & access.miss[at]).any()
    assert (access.slots[at][~valid] == -1).all()
    assert not (access.hit | access.miss | access.born)[at][~valid].any()
    lists = [pages[at][mask[at]].tolist() for mask in (access.hit, access.miss, access.born)]
    return Outcome(access.slots[at][valid].tolist(), *lists)


def _compare(lru: BucketedLRU, rows: list[LiteralRow]) -> None:
    for number, row in enumerate(rows):
        limit = len(row.page)
        assert lru.page[number, :limit].tolist() == [-1 if page is None else page for page in row.page]
        assert (lru.page[number, limit:] == -1).all()
        held = lru.page[number, :limit] >= 0
        assert lru.stamp[number, :limit][held].tolist() == [stamp for stamp, page in zip(row.stamp, row.page) if page is not None]


@pytest.mark.parametrize("seed", range(6))
def test_many_rows_follow_the_literal_steps_past_the_last_stamp(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = [8, 11, 12, 20]
    lru = _make_lru(limits, capacity=24)
    literal = [LiteralRow(limit) for limit in limits]
    for row in range(3):
        first = sorted(rng.choice(40, 10, replace=False).tolist())
        lru.warm(_rows(row), _pad([first]))
        literal[row].warm(first)
    _compare(lru, literal)
    evicted = born_seen = 0
    for step in range(200):
        # Rows take part at their own pace, so that their clocks pass the last stamp at different steps.
        batch = [row for row in range(4) if rng.random() < (0.9, 0.5, 0.7, 0.95)[row]]
        if not batch:
            continue
        selections = [sorted(rng.choice(40, int(rng.integers(1, 9)), replace=False).tolist()) for _ in batch]
        born = [int(rng.choice(pages)) if rng.random() < 0.3 else -1 for pages in selections]
        before = int((lru.page >= 0).sum())
        access = lru.access(_rows(*batch), _pad(selections), np.array(born, np.int32))
        for at, row in enumerate(batch):
            expected = literal[row].access(selections[at], born[at])
            assert _outcome(access, _pad(selections), at) == expected, (step, row)
            evicted += len(expected.misses) + len(expected.born)
            born_seen += len(expected.born)
        evicted -= int((lru.page >= 0).sum()) - before
        _compare(lru, literal)
        _check(lru)
    assert min(row.step for row in literal) > STAMPS + 20
    assert evicted > 200
    assert born_seen > 20


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_sequence_follows_the_literal_steps(data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(3, 7), min_size=1, max_size=4))
    lru = _make_lru(limits, pages=12)
    literal = [LiteralRow(limit) for limit in limits]
    start = data.draw(st.sampled_from([0, 60, 63, 64, 200]))
    for row in range(len(limits)):
        lru.clock[row] = literal[row].step = start
    for _ in range(data.draw(st.integers(1, 12))):
        batch = data.draw(st.lists(st.integers(0, len(limits) - 1), min_size=1, unique=True))
        selections = [sorted(data.draw(st.sets(st.integers(0, 11), max_size=limits[row]))) for row in batch]
        born = [data.draw(st.sampled_from([-1, *pages])) for pages in selections]
        access = lru.access(_rows(*batch), _pad(selections), np.array(born, np.int32))
        for at, row in enumerate(batch):
            assert _outcome(access, _pad(selections), at) == literal[row].access(selections[at], born[at])
            assert set(selections[at]) <= _held(lru, row).keys()  # this step's pages are never victims
        _compare(lru, literal)
        _check(lru)
        if data.draw(st.integers(0, 9)) == 0:
            row = data.draw(st.integers(0, len(limits) - 1))
            lru.open(_rows(row), limits[row])
            literal[row] = LiteralRow(limits[row])


def test_up_to_the_last_stamp_it_is_exact_lru() -> None:
    """A trace of at most 63 steps: unbounded time stamps give the same pages, hit for hit."""
    limit, hits, evictions = 12, 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lru = _make_lru([limit], pages=30)
        last_use: dict[int, tuple[int, int]] = {}  # page -> (step of its last use, slot: what decides inside a step)
        for step in range(1, STAMPS):
            pages = sorted(rng.choice(30, int(rng.integers(1, 8)), replace=False).tolist())
            access = lru.access(_rows(0), _pad([pages]))
            assert access.hit[0].tolist() == [page in last_use for page in pages]
            hits += int(access.hit.sum())
            for page in pages:
                if page in last_use:
                    last_use[page] = (step, last_use[page][1])
            for page in (page for page in pages if page not in last_use):
                unused = set(range(limit)) - {slot for _, slot in last_use.values()}
                if not unused:
                    oldest = min(last_use, key=last_use.__getitem__)
                    assert last_use[oldest][0] < step
                    unused = {last_use.pop(oldest)[1]}
                    evictions += 1
                last_use[page] = (step, min(unused))
            assert _held(lru, 0) == {page: slot for page, (_, slot) in last_use.items()}
            _check(lru)
    assert hits > 500
    assert evictions > 500


def test_only_as_many_of_a_bucket_as_are_needed() -> None:
    lru = _make_lru([6])
    lru.warm(_rows(0), _pad([[10, 11, 12, 13, 14, 15]]))
    access = lru.access(_rows(0), _pad([[12, 40, 41]]))
    # All have stamp 0; the hit is protected, the two lowest slots go, the others of the bucket stay.
    assert access.slots.tolist() == [[2, 0, 1]]
    assert sorted(_held(lru, 0)) == [12, 13, 14, 15, 40, 41]
    assert lru.stamp[0].tolist() == [1, 1, 1, 0, 0, 0]
    # Next the rest of the old bucket, then the next bucket.
    lru.access(_rows(0), _pad([[50, 51, 52, 53]]))
    assert sorted(_held(lru, 0)) == [12, 41, 50, 51, 52, 53]
    _check(lru)


def test_free_slots_go_before_any_page() -> None:
    lru = _make_lru([4])
    lru.access(_rows(0), _pad([[1, 2]]))
    access = lru.access(_rows(0), _pad([[7, 8]]))
    assert access.slots.tolist() == [[2, 3]]
    assert _held(lru, 0) == {1: 0, 2: 1, 7: 2, 8: 3}


def test_a_full_row_of_this_steps_pages_keeps_them() -> None:
    lru = _make_lru([4])
    lru.access(_rows(0), _pad([[1, 2, 3, 4]]))
    for step in range(STAMPS + 5):
        access = lru.access(_rows(0), _pad([[1, 2, 3, 5 + step % 2]]))
        assert access.hit.sum() == 3
        assert access.miss.sum() == 1
        assert sorted(_held(lru, 0)) == [1, 2, 3, 5 + step % 2]


def test_old_pages_still_age_after_the_last_stamp() -> None:
    """Past 63 steps the pages that are used less often are still the ones that go."""
    lru = _make_lru([3])
    lru.access(_rows(0), _pad([[0, 1, 2]]))
    for _ in range(STAMPS + 10):
        lru.access(_rows(0), _pad([[0]]))
    lru.access(_rows(0), _pad([[1]]))
    lru.access(_rows(0), _pad([[0, 9]]))
    assert sorted(_held(lru, 0)) == [0, 1, 9]


def test_a_page_that_begins_does_not_cross_the_link() -> None:
    lru = _make_lru([4, 4])
    access = lru.access(_rows(0, 1), _pad([[1, 5], [5, 6]]), np.array([5, -1], np.int32))
    assert access.born.tolist() == [[False, True], [False, False]]
    assert access.miss.tolist() == [[True, False], [True, True]]
    again = lru.access(_rows(0), _pad([[5]]), np.array([5], np.int32))
    assert (again.hit.sum(), again.born.sum(), again.miss.sum()) == (1, 0, 0)


def test_more_pages_than_slots_is_refused() -> None:
    lru = _make_lru([3, 2], capacity=3)
    with pytest.raises(RuntimeError, match="row 1 misses 3 pages but only 2 of its 2 slots"):
        lru.access(_rows(0, 1), _pad([[1, 2, 3], [1, 2, 3]]))
    lru.access(_rows(0), _pad([[1, 2, 3]]))
    with pytest.raises(RuntimeError, match="row 0 misses 2 pages but only 1 of its 3 slots"):
        lru.access(_rows(0), _pad([[1, 2, 8, 9]]))  # the hits are no victims
    with pytest.raises(RuntimeError, match="row 0 misses 1 pages but only 0 of its 0 slots"):
        BucketedLRU(1, 4, FlatPageTable(1, 9)).access(_rows(0), _pad([[1]]))


@pytest.mark.parametrize("limit", [0, -1, 5])
def test_a_limit_outside_the_capacity_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=rf"limit\(={limit}\) must be in 1..4"):
        _make_lru([4]).open(_rows(0), limit)


def test_closing_forgets_a_row_and_leaves_the_others() -> None:
    lru = _make_lru([4, 4])
    lru.access(_rows(0, 1), _pad([[1, 2], [3]]))
    lru.close(_rows(0))
    assert _held(lru, 0) == {}
    assert _held(lru, 1) == {3: 0}
    _check(lru)
    lru.open(_rows(0), 2)
    assert not lru.access(_rows(0), _pad([[1, 2]])).hit.any()


def test_warm_takes_what_fits_in_order() -> None:
    lru = _make_lru([2, 4], capacity=4)
    slots = lru.warm(_rows(0, 1), _pad([[5, 6, 7], [8]]))
    assert slots.tolist() == [[0, 1, -1], [0, -1, -1]]
    assert (_held(lru, 0), _held(lru, 1)) == ({5: 0, 6: 1}, {8: 0})
    lru.warm(_rows(0), _pad([[9]]))
    assert _held(lru, 0) == {9: 0}
    _check(lru)


def test_integrity_sees_a_broken_map() -> None:
    lru = _make_lru([2, 2], capacity=4)
    lru.access(_rows(0, 1), _pad([[1, 2], [3]]))
    lru.check_integrity()
    lru.table.put(_rows(1), np.array([3], np.int32), np.array([1], np.int32))
    with pytest.raises(RuntimeError, match="row 1: page 3 is in slot 0 but the table says 1"):
        lru.check_integrity()
    lru = _make_lru([2], capacity=4)
    lru.page[0, 3] = 7
    with pytest.raises(RuntimeError, match="beyond its row's limit"):
        lru.check_integrity()
