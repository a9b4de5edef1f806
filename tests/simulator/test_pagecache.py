"""Hits and bytes of a recorded run come out exactly, and follow the buffer as they must."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.compare import compare
from simulator.pagecache import BORN, HITS, MISSES, SELECTED, RequestCache, buffers_of, replay_pages
from simulator.session import Session
from simulator.settings import scenario
from tests.simulator.runs import Event, MemoryRun, Server, make_meta, make_requests
from tests.trace_factory import TraceSpec, make_run
from traces.reader import read_run
from traces.schema import DECODE, WARM


@pytest.mark.parametrize(
    "spec",
    [
        TraceSpec(requests=8, seed=1),
        TraceSpec(requests=6, seed=2, buffer_factor=1.0, turnover=0.6),
        TraceSpec(requests=6, seed=3, buffer_factor=5.0, dense_layers=()),
        TraceSpec(requests=5, seed=4, budget=0.3, page_size=8),
        TraceSpec(requests=5, seed=5, budget=None, dense_layers=()),
        TraceSpec(requests=5, seed=6, kv_heads=1, layers=1, dense_layers=(), window=0, sink=0),
    ],
)
def test_every_layer_of_every_step_equals_the_trace(tmp_path, spec):
    session = Session(read_run(make_run(tmp_path / "run", spec)))
    result = session.simulate(schedule="recorded")
    comparison = compare(session, result, None)
    assert [line for line in comparison.exact if not line.equal] == []
    assert comparison.recorded.pages == comparison.measured.pages


def test_overlap_waste_is_replayed_too(session):
    """The made-up server decodes finished requests once more; those events have traffic and must be found."""
    contexts = [(e.request, e.context) for e in session.run.events if e.kind == DECODE]
    limits = {r.id: r.prompt_tokens + r.output_tokens for r in session.run.requests}
    assert any(context >= limits[request] for request, context in contexts)
    comparison = compare(session, session.simulate(schedule="recorded"), session.simulate())
    assert all(line.equal for line in comparison.exact)


def test_a_changed_selection_is_noticed_with_its_place():
    run = Server(make_meta(), make_requests(6)).serve()
    victim = next(i for i, step in enumerate(run.steps) if step.hits[1] > 0)
    step = run.steps[victim]
    run.steps[victim] = step.model_copy(update={"hits": (step.hits[0], step.hits[1] - 1)})
    session = Session(run)
    comparison = compare(session, session.simulate(schedule="recorded"), None)
    broken = [line for line in comparison.exact if not line.equal]
    assert [line.name for line in broken] == ["hits"]
    assert f"step {step.step} ({step.mode}), layer 1" in str(broken[0].first)
    assert comparison.failures


def test_a_bigger_buffer_never_has_fewer_hits(session):
    misses = []
    for factor in (1, 1.5, 2, 3, 5, 8, 100):
        totals = session.outcomes(scenario(session.run.meta, [("sparse.buffer_factor", float(factor))])).totals()
        assert (totals[SELECTED] == totals[HITS] + totals[MISSES] + totals[BORN]).all()
        misses.append(totals[MISSES].sum())
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1]


def test_a_buffer_for_everything_misses_each_page_once(session):
    """Compulsory misses only: a page that was neither warm nor born is fetched at its first selection and stays."""
    run = session.run
    seen: dict[tuple[int, int, int], set[int]] = {}
    expected = 0
    for event in run.events:
        for layer, heads in enumerate(event.pages):
            for head, pages in enumerate(heads):
                row = {int(page) for page in pages if page >= 0}
                known = seen.setdefault((event.request, layer, head), set())
                born = {(event.context - 1) // 4} if (event.context - 1) % 4 == 0 else set()
                if event.kind == DECODE:
                    expected += len(row - known - born)
                known |= row
    totals = session.outcomes(scenario(run.meta, [("sparse.buffer_factor", 1000.0)])).totals()
    assert totals[MISSES].sum() == expected


def test_warm_starts_over_and_dense_layers_keep_everything():
    meta = make_meta()
    plan = buffers_of(meta).plan(80)
    assert plan.capacity[0] > plan.capacity[1]
    cache = RequestCache(plan, 21, 4)
    pages = np.full((2, 2, 10), -1, np.int32)
    pages[0] = np.arange(10)
    pages[1, :, :4] = [0, 3, 8, 9]
    cache.warm(pages)
    assert cache.access(pages, 40)[HITS].tolist() == [20, 8]
    pages[1, :, :4] = [0, 4, 8, 9]
    assert cache.access(pages, 40)[MISSES].tolist() == [0, 2]
    cache.warm(pages)
    assert cache.access(pages, 40)[MISSES].tolist() == [0, 0]
    cache.check_integrity()


def test_the_newest_page_is_born_once():
    cache = RequestCache(buffers_of(make_meta()).plan(80), 21, 4)
    pages = np.broadcast_to(np.arange(4, dtype=np.int32), (2, 2, 4)).copy()
    cache.warm(pages[:, :, :3])
    assert cache.access(pages, 13)[BORN].tolist() == [2, 2]
    counts = cache.access(pages, 14)
    assert (counts[BORN].sum(), counts[HITS].sum()) == (0, 16)


def test_a_selection_that_cannot_be_is_refused():
    run = Server(make_meta(), make_requests(3)).serve()
    first = run.events[0]
    wide = np.zeros((2, 3, 1), np.int32)
    with pytest.raises(ValueError, match="2 layers x 2 KV heads"):
        replay_pages(MemoryRun(run.meta, run.requests, run.steps, [first._replace(pages=wide)]))
    far = np.full((2, 2, 1), 10_000, np.int32)
    with pytest.raises(ValueError, match="page 10000"):
        replay_pages(MemoryRun(run.meta, run.requests, run.steps, [first._replace(pages=far)]))
    with pytest.raises(ValueError, match="request 77"):
        replay_pages(MemoryRun(run.meta, run.requests, run.steps, [Event(0, 77, 4, WARM, first.pages)]))
