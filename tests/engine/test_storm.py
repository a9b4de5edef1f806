"""Requests finished, aborted and retracted at random points under memory pressure: nothing is lost, no answer changes.

``--full`` sends two hundred; without it a part of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine.harness import EngineProcess
from tests.engine.prompts import piece

pytestmark = pytest.mark.slow

HOME = 512


@pytest.fixture(scope="module")
def small(model: object) -> Iterator[EngineProcess]:
    """A home for a few requests, and an admission that is too hopeful: decode runs out of home and retracts."""
    engine = EngineProcess(
        sparse_algorithm="quest", sparse_budget="512", sparse_host_memory=str(HOME), sparse_device_memory=str(2048), max_running_requests=12,
        chunked_prefill_size=32, schedule_conservativeness=0.01, enable_mixed_chunk=True,
    )  # fmt: skip
    yield engine
    engine.close()


def _requests(count: int, kinds_of: int) -> tuple[list[list[int]], list[int]]:
    """``count`` requests of ``kinds_of`` kinds in turn."""
    rng = random.Random(7)
    kinds = [(piece(20_000 + 150 * number, rng.randrange(1, 24)), rng.randrange(16, 48)) for number in range(kinds_of)]
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    return [prompt for prompt, _ in chosen], [length for _, length in chosen]


def test_requests_in_a_storm(small: EngineProcess, full: bool) -> None:
    """The budget covers every context, so that a retracted request, which is prefilled again, must say the same."""
    count, kinds = (200, 20) if full else (40, 8)
    prompts, lengths = _requests(count, kinds)
    calm = small.call("storm", prompts[:kinds], lengths[:kinds], 0.0, 1, 0)
    assert all(len(ids) == length for ids, length in zip(calm, lengths, strict=False))
    before = small.report()
    answers = small.call("storm", prompts, lengths, 0.35, 16, 1)
    after = small.report()  # integrity of tiers, ledger and tables; raises when something does not add up
    wrong = [number for number, ids in enumerate(answers) if ids is not None and ids != calm[number % kinds]]
    assert not wrong
    finished = sum(ids is not None for ids in answers)
    assert 0.3 * count <= finished <= count
    if full:
        assert finished < count
        assert after["running_retractions"] > before["running_retractions"]
    assert after["live"] == after["frames_used"] == 0
    assert after["home_used"] == after["evictable"]


def test_aborts_with_a_small_budget_and_few_frames(small: EngineProcess, full: bool) -> None:
    """Rows evict, requests wait for frames, some are aborted: the others say what they say alone."""
    if not full:
        pytest.skip("takes minutes on two cores: run with --full")
    count, kinds = 40, 20
    prompts, lengths = _requests(count, kinds)
    small.reconfigure({"algorithm": "quest", "budget": 48, "sink": 16, "window": 16, "buffer_factor": 1.0, "device_memory": 256}, chunked_prefill_size=32)
    calm = small.call("storm", prompts[:kinds], lengths[:kinds], 0.0, 1, 0)
    answers = small.call("storm", prompts, lengths, 0.3, 8, 2)
    report = small.report()
    assert [number for number, ids in enumerate(answers) if ids is not None and ids != calm[number % kinds]] == []
    assert report["sparse_admission_waits"] > 0
    assert report["sparse_page_misses"] > 0
    assert report["frames_used"] == report["live"] == 0
