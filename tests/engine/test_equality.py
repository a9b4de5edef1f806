"""Sparse equals dense: with a budget that covers the context every algorithm answers token for token what stock SGLang answers.

Truth is stock SGLang's ``torch_native`` backend on the same weights, float32, greedy; ``--full`` sends prompts up to 6000 tokens and asks for 64 new ones.
"""

from __future__ import annotations

import pytest

from tests.engine.harness import EngineProcess
from tests.engine.prompts import PAGE, samples, shared_tokens

pytestmark = pytest.mark.slow

Answers = dict[str, list[list[int]]]
COVERING = ("quest", "dense", "streaming", "oracle")
ROOMY = 20_000


def config(algorithm: str, device_tokens: int = ROOMY) -> dict[str, object]:
    """A configuration whose budget covers every prompt here."""
    return {"algorithm": algorithm, "device_memory": device_tokens} | ({} if algorithm == "dense" else {"budget": 8192})


def check(engine: EngineProcess, dense: Answers, name: str, full: bool) -> list[int]:
    """Send the sample; every answer must be dense's. Returns cached tokens of each prompt."""
    sample = samples(full)[name]
    answers = engine.generate(sample.prompts, sample.new_tokens, sample.together)
    wrong = [len(prompt) for prompt, one, want in zip(sample.prompts, answers, dense[name], strict=True) if one["ids"] != want]
    assert not wrong, f"{name}: answers to prompts of {wrong} tokens differ from dense"
    return [one["cached"] for one in answers]


def test_alone_and_in_a_batch(sparse: EngineProcess, dense: Answers, full: bool) -> None:
    """Every length alone with a fresh prefill, then eight lengths in one batch on cached prefixes; every algorithm."""
    for algorithm in COVERING:
        first = algorithm == COVERING[0]
        sparse.reconfigure(config(algorithm), keep_cache=not first, chunked_prefill_size=2048, mixed_chunk=False)
        if first or full:
            assert max(check(sparse, dense, "alone", full)) == 0 or not first
        cached = check(sparse, dense, "batch", full)
        assert cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in samples(full)["batch"].prompts]
    report = sparse.report()
    assert report["frames_used"] == 0
    assert report["home_used"] == report["evictable"]


def test_chunked_prefill(sparse: EngineProcess, dense: Answers, full: bool) -> None:
    """Small chunks (512 tokens with ``--full``), fresh, all at once, decoding tokens mixed into the chunks."""
    for algorithm in COVERING if full else COVERING[:1]:
        sparse.reconfigure(config(algorithm), chunked_prefill_size=512 if full else 128, mixed_chunk=True)
        assert max(check(sparse, dense, "batch", full)) == 0


def test_after_a_radix_hit(sparse: EngineProcess, dense: Answers, full: bool) -> None:
    """Prefixes that end at a page boundary and one token beside it come from home."""
    for algorithm in COVERING:
        sparse.reconfigure(config(algorithm), chunked_prefill_size=2048, mixed_chunk=False)
        cached = check(sparse, dense, "prefixes", full)
        shared = shared_tokens(full)
        assert cached == [0, shared, shared - 16, shared - 16, shared - 32]
        assert sparse.report()["sparse_link_bytes_prefix"] > 0


def test_one_eighth_of_the_frames(sparse: EngineProcess, dense: Answers, full: bool) -> None:
    """Frames for one eighth of the KV of eight requests: admission lets them in as they fit, answers stay dense's."""
    sample = samples(full)["equal"]
    pages = sum(-(-(len(prompt) + sample.new_tokens + 1) // PAGE) for prompt in sample.prompts)
    for number, algorithm in enumerate(COVERING if full else COVERING[:2]):
        sparse.reconfigure(config(algorithm, pages * PAGE // 8), keep_cache=number > 0, chunked_prefill_size=2048, mixed_chunk=False)
        check(sparse, dense, "equal", full)
        report = sparse.report()
        assert report["sparse_admission_waits"] > 0
        assert report["frames_used"] == 0
