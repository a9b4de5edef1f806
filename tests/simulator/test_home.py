"""The host tier's books under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.home import Holding, Home


def holding(family: int, shared: int, number: int, pages: int) -> Holding:
    return Holding([f"f{family}-{i}" if i < shared else f"r{number}-{i}" for i in range(pages)])


def test_insert_match_and_evict_by_hand():
    home = Home(8)
    first = holding(0, 3, 1, 5)
    home.allocate(first, 4)
    home.insert(first, 3)
    assert (home.free, home.private, first.locked, first.private, home.evictable) == (4, 1, 3, 1, 0)
    home.release(first)
    assert (home.free, home.evictable) == (5, 3)
    second = holding(0, 3, 2, 6)
    assert home.match(second.hashes, 6) == 3
    assert home.match(second.hashes, 2) == 2
    home.lock(second, 2)
    assert home.evictable == 1
    home.allocate(second, 6)
    assert (home.free, home.evicted, home.evictable) == (0, 1, 0)
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 free and 0 evictable of 8"):
        home.allocate(second, 1)
    home.check_integrity()


def test_two_requests_that_compute_the_same_page_keep_one():
    home = Home(10)
    twins = [holding(0, 4, number, 4) for number in (1, 2)]
    for twin in twins:
        home.allocate(twin, 4)
    for twin in twins:
        home.insert(twin, 4)
    assert (home.used, home.evictable) == (4, 0)
    home.release(twins[0])
    assert home.evictable == 0
    home.release(twins[1])
    assert home.evictable == 4


def test_least_recently_used_leaf_goes_first():
    home = Home(6)
    for number in (1, 2):
        one = holding(number, 3, number, 3)
        home.allocate(one, 3)
        home.insert(one, 3)
        home.release(one)
    home.match(holding(1, 3, 1, 3).hashes, 3)
    home.evict(3)
    assert home.match(holding(1, 3, 1, 3).hashes, 3) == 3
    assert home.match(holding(2, 3, 2, 3).hashes, 3) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 8), st.integers(0, 3)), max_size=40))
def test_books_balance(actions):
    home = Home(20)
    live: list[Holding] = []
    for number, (family, shared, pages, keep) in enumerate(actions):
        one = holding(family, min(shared, pages), number, pages)
        home.lock(one, home.match(one.hashes, pages - 1))
        missing = pages - one.locked
        if missing > home.free + home.evictable:
            home.release(one)
        else:
            home.allocate(one, missing)
            home.insert(one, pages - number % 2)
            live.append(one)
        home.check_integrity()
        while len(live) > keep:
            home.release(live.pop(0))
            home.check_integrity()
    for one in live:
        home.release(one)
    home.check_integrity()
    assert home.free + home.evictable == home.pages
    home.evict(home.pages)
    assert home.free == home.pages
