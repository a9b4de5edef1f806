"""Selection of the serving path against a plain reference, on queries and keys of the real model; and the effect of every flag, by its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import EngineProcess
from tests.engine.prompts import PAGE, piece

pytestmark = pytest.mark.slow

SINK, WINDOW, BUDGET = 32, 48, 192


def reference_pages(q: Any, keys: Any, tokens: int) -> list[int]:
    """Quest for one row, in plain Python over the live keys: ``q [G, D]``, ``keys [N, P, D]``."""
    pages = -(-tokens // PAGE)
    scores = []
    for page in range(pages):
        live = keys[page, : min(PAGE, tokens - page * PAGE)]
        low, high = live.amin(0), live.amax(0)
        scores.append(max(float(np.maximum(query * low, query * high).sum()) for query in q))
    first = min((tokens - WINDOW) // PAGE, pages - 1)
    sink = min(SINK // PAGE, first)
    forced = {*range(sink), *range(first, pages)}
    want = max(min(BUDGET // PAGE, pages) - len(forced), 0)
    candidates = sorted(range(sink, first), key=lambda page: (-scores[page], page))
    # Float sums differ in their last digits between ways to add: pages as good as the last chosen one are interchangeable.
    return sorted(forced | set(candidates[:want]))


def margin(q: Any, keys: Any, tokens: int, ours: set[int], theirs: set[int]) -> float:
    """How far apart the scores of the pages in dispute are, relative to their size."""
    scores = {page: max(float(np.maximum(query * keys[page].amin(0), query * keys[page].amax(0)).sum()) for query in q) for page in ours ^ theirs}
    return (max(scores.values()) - min(scores.values())) / max(abs(value) for value in scores.values())


def test_selection_equals_the_plain_reference(sparse: EngineProcess, tmp_path: Path) -> None:
    """Page set of every row, layer and step."""
    import torch

    sparse.reconfigure({"algorithm": "quest", "budget": BUDGET, "sink": SINK, "window": WINDOW, "device_memory": 8000}, chunked_prefill_size=2048)
    folder = tmp_path / "selections"
    sparse.call("rpc", "sparse_capture", path=str(folder))
    try:
        sparse.generate([piece(2_000, 500), piece(3_000, 333)], 5)
    finally:
        sparse.call("rpc", "sparse_capture", path=None)
    rows = layers = 0
    for file in sorted(folder.iterdir()):
        kept = torch.load(file)
        q, keys, pages = kept["q"].numpy(), kept["keys"].permute(0, 2, 1, 3, 4), kept["pages"].numpy()
        layers = max(layers, kept["layer"] + 1)
        for b, tokens in enumerate(kept["tokens"].tolist()):
            for head in range(q.shape[1]):
                ours = [page for page in pages[b, head].tolist() if page >= 0]
                own = keys[b, head]
                want = reference_pages(q[b, head], _Amin(own.numpy()), tokens)
                assert len(ours) == len(set(ours)) == len(want)
                if ours != want:
                    assert margin(q[b, head], _Amin(own.numpy()), tokens, set(ours), set(want)) < 1e-5
                rows += 1
    assert layers == 30
    assert rows >= 30 * 3 * 2 * 4


class _Amin:
    """Numpy pages with torch's names for the bounds."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, where: Any) -> Any:
        return _Live(self.array[where])


class _Live:
    def __init__(self, array: Any) -> None:
        self.array = array

    def amin(self, axis: int) -> Any:
        return self.array.min(axis)

    def amax(self, axis: int) -> Any:
        return self.array.max(axis)


def test_every_flag_is_seen_in_the_run(sparse: EngineProcess, tmp_path: Path) -> None:
    """Budget, sink, window, dense layers, algorithm, memory, buffer factor and trace, each by what the recorded run shows."""
    from traces.reader import read_run
    from traces.schema import DECODE, WARM
    from traces.validate import validate_run

    prompt = piece(5_000, 700)
    hits = {}
    for factor in (1.0, 5.0):
        folder = tmp_path / f"factor-{factor}"
        config = {
            "algorithm": "quest", "budget": BUDGET, "sink": SINK, "window": WINDOW, "dense_layers": [0, 7], "buffer_factor": factor,
            "device_memory": 5000, "trace": str(folder),
        }  # fmt: skip
        sparse.reconfigure(config, chunked_prefill_size=512)
        sparse.generate([prompt], 40)
        report = sparse.report()
        assert report["frames_total"] == -(-5000 // PAGE) * 90
        assert validate_run(folder) == []
        run = read_run(folder)
        assert run.meta.sparse.budget == BUDGET
        assert run.meta.sparse.algorithm == "quest"
        assert run.meta.server.home_tokens == report["home_tokens"]
        events = [event for event in run.selections() if event.kind == DECODE]
        assert any(event.kind == WARM for event in run.selections())
        for event in events:
            counts = (event.pages >= 0).sum(axis=2)
            pages = -(-event.context // PAGE)
            assert (counts[[0, 7]] == pages).all()
            assert (np.delete(counts, [0, 7], axis=0) == BUDGET // PAGE).all()
            for page in [*range(SINK // PAGE), *range((event.context - WINDOW) // PAGE, pages)]:
                assert (event.pages == page).any(axis=2).all(), f"page {page} of {pages} is not in every row"
        hits[factor] = sum(sum(step.hits) for step in run.steps)
        assert hits[factor] == report["sparse_page_hits"] == run.meta.totals["sparse_page_hits"]
    assert hits[5.0] > hits[1.0]


def test_streaming_reads_sink_and_latest_only(sparse: EngineProcess, tmp_path: Path) -> None:
    """``--sparse-algorithm`` decides who selects: streaming's pages follow from the length alone."""
    from traces.reader import read_run
    from traces.schema import DECODE

    folder = tmp_path / "streaming"
    sparse.reconfigure({"algorithm": "streaming", "budget": BUDGET, "sink": SINK, "window": WINDOW, "device_memory": 5000, "trace": str(folder)})
    sparse.generate([piece(5_000, 700)], 20)
    sparse.report()
    events = [event for event in read_run(folder).selections() if event.kind == DECODE]
    assert events
    for event in events:
        pages = -(-event.context // PAGE)
        want = [*range(SINK // PAGE), *range(pages - (BUDGET - SINK) // PAGE, pages)]
        assert (event.pages == np.array(want)).all()


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic(sparse: EngineProcess) -> None:
    """The others are served; nothing is lost."""
    sparse.reconfigure({"algorithm": "dense", "device_memory": 640})
    answer = sparse.call("refused", piece(0, 900), 8)
    assert "device frames" in answer
    assert "--sparse-device-memory" in answer
    assert "the device tier has 3600" in answer
    assert len(sparse.generate([piece(0, 100)], 4)[0]["ids"]) == 4
    report = sparse.report()
    assert report["sparse_refused_requests"] == 1
    assert report["frames_used"] == 0
