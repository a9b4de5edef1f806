"""Timelines by hand, in exact integers; conservation under random load; the measured schedule reproduced."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.compare import compare
from simulator.cost import LinkRates
from simulator.engine import Engine, SimResult
from simulator.metrics import measured_summary, simulated_summary
from simulator.pagecache import PageOutcomes
from simulator.scheduler import ModelledSchedule
from simulator.session import Session
from simulator.work import WorkModel
from simulator.workload import recorded_batches
from tests.simulator.runs import REAL, Server, make_cost, make_meta, make_request, make_requests

SIMPLE = make_cost(model={"step": 100, "prefill_tokens": 10, "decode_rows": 5})


def simulate(meta, requests, cost=SIMPLE, ratio=0.7) -> tuple[SimResult, ModelledSchedule]:
    """Without selections: every count of pages is zero."""
    schedule = ModelledSchedule(meta)
    schedule.ratio.INIT = schedule.ratio.current = ratio  # how careful the server is with home
    work, nothing = WorkModel(meta), PageOutcomes(meta.model.layers)
    engine = Engine(requests, schedule, lambda batch: work.of_batch(batch, nothing, exact=False), cost, meta.server.overlap)
    return engine.run(), schedule


def timeline(result: SimResult):
    return [(s.batch.mode, s.start_ns, s.end_ns, [(r.request, r.prefix, r.new) for r in s.batch.rows]) for s in result.steps]


def test_chunked_prefill_and_decode_by_hand():
    result, _ = simulate(make_meta(overlap=False), [make_request(0, 50, 10, 3), make_request(1, 300, 20, 2)])
    assert timeline(result) == [
        ("prefill", 57, 257, [(0, 0, 10)]),
        ("decode", 277, 382, [(0, 10, 1)]),
        ("prefill", 402, 662, [(1, 0, 16)]),
        ("prefill", 682, 822, [(1, 16, 4)]),
        ("decode", 842, 952, [(0, 11, 1), (1, 20, 1)]),
    ]
    first, second = result.requests
    assert (first.scheduled_ns, first.first_token_ns, first.finish_ns) == (57, 260, 955)
    assert (second.scheduled_ns, second.first_token_ns, second.finish_ns) == (402, 825, 955)
    assert (result.horizon_ns, result.busy_ns, result.idle_ns) == (972, 815, {"scheduler": 107, "no_work": 50, "link": 0})


def test_overlap_hands_tokens_on_late_and_wastes_a_step():
    result, _ = simulate(make_meta(), [make_request(0, 50, 10, 2)])
    assert timeline(result) == [("prefill", 57, 257, [(0, 0, 10)]), ("decode", 277, 382, [(0, 10, 1)]), ("decode", 402, 507, [(0, 11, 1)])]
    assert (result.requests[0].first_token_ns, result.requests[0].finish_ns, result.horizon_ns) == (385, 510, 527)


def test_mixed_chunk_carries_decode_rows():
    result, _ = simulate(make_meta(overlap=False, mixed_chunk=True), [make_request(0, 0, 8, 4), make_request(1, 1, 20, 1)])
    assert [(s.batch.mode, [(r.request, r.new) for r in s.batch.rows]) for s in result.steps] == [
        ("prefill", [(0, 8)]),
        ("mixed", [(1, 12), (0, 1)]),
        ("mixed", [(1, 8), (0, 1)]),
        ("decode", [(0, 1)]),
    ]


def test_a_prefix_is_reused_but_never_the_whole_prompt():
    requests = [make_request(0, 0, 16, 1, family=0), make_request(1, 5_000, 16, 1, family=0), make_request(2, 9_000, 17, 1, family=0)]
    result, _ = simulate(make_meta(overlap=False), requests)
    assert [r.cached_tokens for r in result.requests] == [0, 12, 16]
    without, _ = simulate(make_meta(overlap=False, radix_cache=False), requests)
    assert [r.cached_tokens for r in without.requests] == [0, 0, 0]


def test_running_requests_and_frames_bound_the_batch():
    requests = [make_request(i, 0, 12, 6) for i in range(6)]
    result, _ = simulate(make_meta(overlap=False, max_running_requests=2), requests)
    assert max(len(s.batch.rows) for s in result.steps if s.batch.mode == "decode") == 2
    frames = 2 * ModelledSchedule(make_meta()).ledger.buffers.plan(18).frames
    result, schedule = simulate(make_meta(overlap=False, device_frames=frames), requests)
    assert max(s.batch.frames_used for s in result.steps) == frames
    assert (result.finished, schedule.ledger.used) == (6, 0)


def test_what_never_fits_is_refused():
    requests = [make_request(0, 0, 12, 2), make_request(1, 0, 200, 20), make_request(2, 0, 12, 2)]
    result, _ = simulate(make_meta(device_frames=100), requests)
    assert (result.refused, result.finished) == (1, 2)
    result, _ = simulate(make_meta(home_tokens=64), requests)
    assert (result.refused, result.finished) == (1, 2)


def test_home_pressure_retracts_and_everything_still_finishes():
    requests = [make_request(i, i, 12, 40) for i in range(4)]
    meta = make_meta(home_tokens=128, max_running_requests=4)
    assert simulate(meta, requests)[1].retractions == 0
    result, schedule = simulate(meta, requests, ratio=0.05)
    assert schedule.retractions > 0
    assert result.finished == 4
    assert [r.finish_ns is not None for r in result.requests] == [True] * 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_server_with_known_costs_is_predicted_in_full(overlap, mixed):
    """The made-up server's costs are linear, so fit, recorded and modelled schedule must all find its times."""
    run = Server(make_meta(overlap=overlap, mixed_chunk=mixed), make_requests(40)).serve()
    session = Session(run)
    recorded, modelled = session.simulate(schedule="recorded"), session.simulate()
    comparison = compare(session, recorded, modelled, tolerance=0.001)
    assert comparison.failures == []
    assert [line for line in comparison.timings if abs(line.error or 0) > 0.001] == []
    for result in (recorded, modelled):
        assert [s.batch.rows for s in result.steps] == [s.batch.rows for s in recorded.steps]
        assert [s.batch.mode for s in result.steps] == [s.mode for s in run.steps]
    assert modelled.unrecorded == 0


def test_noise_is_seeded_and_leaves_pages_alone(session):
    noisy = dataclasses.replace(REAL.kinds[0], ratios=np.linspace(0.7, 1.3, 31))
    run = Server(make_meta(), make_requests(30, seed=2), dataclasses.replace(REAL, kinds=(noisy, noisy)), seed=5).serve()
    uneven = Session(run)
    ends = [[s.end_ns for s in uneven.simulate(seed=seed).steps] for seed in (1, 1, 2)]
    assert ends[0] == ends[1] != ends[2]
    assert ends[0] != [s.end_ns for s in uneven.simulate().steps]


def test_a_faster_link_moves_the_same_bytes_in_less_time(session):
    results = []
    for gbps in (0.01, 0.1, 50.0):
        scenario = dataclasses.replace(session.baseline, rates=LinkRates(h2d_gbps=gbps, d2h_gbps=gbps))
        results.append(session.simulate(scenario, schedule="recorded"))
    assert len({sum(t.nbytes for t in result.transfers) for result in results}) == 1
    waits = [result.idle_ns["link"] for result in results]
    assert waits == sorted(waits, reverse=True)
    for transfer in results[0].transfers:
        assert transfer.end_ns - transfer.start_ns >= int(transfer.nbytes / 0.01) - 1


def test_bytes_follow_from_counts(session):
    result = session.simulate()
    page = session.run.meta.head_page_bytes
    by_class = {kind: sum(t.nbytes for t in result.transfers if t.kind == kind) for kind in ("demand", "prefix", "write")}
    assert by_class["demand"] == page * sum(int(s.work.counts[2].sum()) for s in result.steps)
    prefixes = sum(-(-row.prefix // 4) for s in result.steps for row in s.batch.rows if not row.decoding)
    assert by_class["prefix"] == page * prefixes * 2 * 2
    tokens = sum(row.new for s in result.steps for row in s.batch.rows)
    assert by_class["write"] == tokens * 2 * 2 * (2 * 8 * 2)


request_lists = st.lists(
    st.tuples(st.integers(0, 900), st.integers(1, 60), st.integers(1, 30), st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=14
)


@settings(max_examples=150, deadline=None)
@given(
    load=request_lists,
    overlap=st.booleans(),
    mixed=st.booleans(),
    radix=st.booleans(),
    chunk=st.sampled_from([-1, 8, 32]),
    slots=st.integers(1, 5),
    home=st.sampled_from([128, 256, 4096]),
    frames=st.sampled_from([150, 400, 4000]),
    ratio=st.sampled_from([0.7, 0.05]),
)
def test_nothing_is_lost(load, overlap, mixed, radix, chunk, slots, home, frames, ratio):
    """The engine checks its own books; here: every request ends or is refused, rows are contiguous, limits hold."""
    requests, at = [], 0
    for number, (gap, prompt, output, spare, family) in enumerate(load):
        at += gap
        requests.append(make_request(number, at, prompt, output, max_new=output + spare, family=family))
    server = {"overlap": overlap, "mixed_chunk": mixed, "radix_cache": radix, "chunked_prefill_size": chunk}
    meta = make_meta(**server, max_running_requests=slots, home_tokens=home, device_frames=frames)
    result, schedule = simulate(meta, requests, ratio=ratio)
    assert result.finished + result.refused == result.arrived == len(requests)
    assert result.busy_ns + sum(result.idle_ns.values()) == result.horizon_ns
    at_token: dict[int, int] = {}
    for step in result.steps:
        assert len({row.request for row in step.batch.rows}) == len(step.batch.rows)
        assert sum(row.decoding for row in step.batch.rows) <= slots
        assert step.batch.frames_used <= frames
        assert step.batch.home_used <= home
        if chunk > 0:
            assert sum(row.new for row in step.batch.rows if not row.decoding) <= chunk
        for row in step.batch.rows:
            if schedule.retractions == 0 and row.request in at_token:
                assert row.prefix == at_token[row.request]
            at_token[row.request] = row.context


def test_refused_and_aborted_requests_take_their_step_and_have_no_latency():
    """The server runs one token of a refused request to answer it; an aborted one ends after the tokens it had."""
    refused = make_request(1, 10, 1, 1).model_copy(update={"status": "refused", "output_tokens": 0, "max_new_tokens": 0})
    aborted = make_request(2, 20, 12, 4, max_new=30).model_copy(update={"status": "aborted"})
    never = make_request(3, 30, 12, 1).model_copy(update={"status": "aborted", "output_tokens": 0, "scheduled_ns": None})
    run = Server(make_meta(), [make_request(0, 0, 12, 6), refused, aborted, never]).serve()
    session = Session(run)
    for schedule in ("recorded", "modelled"):
        result = session.simulate(schedule=schedule)
        assert (result.skipped, result.refused) == (1, 0)
        assert simulated_summary(result).requests == measured_summary(run).requests == 1
        assert [s.batch.rows for s in result.steps] == [s.batch.rows for s in session.simulate().steps]


def test_the_last_chunk_before_a_retraction_is_one():
    """A row that starts over, or decodes next, ends the prefill; one that goes on from its end does not."""
    meta = make_meta(home_tokens=128)
    server = Server(meta, [make_request(i, i, 12, 40) for i in range(4)])
    server.engine.schedule.ratio.INIT = server.engine.schedule.ratio.current = 0.05
    run = server.serve()
    assert server.engine.schedule.retractions > 0
    assert [b.rows for b in recorded_batches(run.steps)] == [tuple(r._replace(epoch=0) for r in s.batch.rows) for s in server.engine.steps]
    session = Session(run)
    assert all(line.equal for line in compare(session, session.simulate(schedule="recorded"), None).exact)
