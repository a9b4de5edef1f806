"""What-if settings: a grid, and errors that say what would be right."""

from __future__ import annotations

import pytest

from simulator.session import Session
from simulator.settings import SETTINGS, parse_grid, scenario
from simulator.whatif import run_grid
from tests.simulator.runs import Server, make_meta, make_request


def test_a_grid_is_every_combination():
    grid = parse_grid(["sparse.buffer_factor=1,2.5", "server.overlap=true,false"])
    assert grid == [
        (("sparse.buffer_factor", 1.0), ("server.overlap", True)),
        (("sparse.buffer_factor", 1.0), ("server.overlap", False)),
        (("sparse.buffer_factor", 2.5), ("server.overlap", True)),
        (("sparse.buffer_factor", 2.5), ("server.overlap", False)),
    ]
    assert parse_grid([]) == [()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparse.bufer_factor=2", "did you mean sparse.buffer_factor"),
        ("nonsense=2", "unknown key. Keys: sparse.buffer_factor"),
        ("sparse.budget=64", "fixed by the recording"),
        ("server.page_size=8", "fixed by the recording"),
        ("sparse.buffer_factor=0.5", "must be >= 1"),
        ("sparse.buffer_factor=nan", "must be >= 1"),
        ("sparse.buffer_factor=inf", "must be >= 1"),
        ("sparse.buffer_factor=two", "expected a number"),
        ("server.max_running_requests=2.5", "expected a whole number"),
        ("server.max_running_requests=0", "must be >= 1"),
        ("server.device_frames=-3", "must be >= 1"),
        ("server.chunked_prefill_size=0", "-1 for off"),
        ("server.overlap=maybe", "expected true or false"),
        ("link.h2d_gbps=0", "must be > 0"),
        ("link.h2d_gbps", "expected key=value"),
        ("link.h2d_gbps=", "expected key=value"),
        ("sparse.buffer_factor=1,,2", "expected a number"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_is_right(text, message):
    with pytest.raises(ValueError, match=message):
        parse_grid([text])


def test_a_key_given_twice_is_refused():
    with pytest.raises(ValueError, match="given twice"):
        parse_grid(["link.h2d_gbps=1", "link.h2d_gbps=2"])


def test_a_chunk_that_is_no_page_multiple_is_refused():
    with pytest.raises(ValueError, match="multiple of the run's page size 4"):
        scenario(make_meta(), [("server.chunked_prefill_size", 18)])


def test_every_key_changes_what_it_names():
    meta = make_meta()
    values = {"sparse.buffer_factor": 3.5, "link.h2d_gbps": 7.0, "link.d2h_gbps": 9.0, "server.chunked_prefill_size": 32}
    for key, setting in SETTINGS.items():
        value = values.get(key, setting.kind(77))
        if setting.kind is bool:
            value = not getattr(meta.server, key.partition(".")[2])
        made = scenario(meta, [(key, value)])
        part, name = key.split(".")
        holder = made.rates if part == "link" else getattr(made.meta, part)
        assert getattr(holder, name) == value


@pytest.mark.parametrize(
    "assignment",
    ["server.max_running_requests=1", "server.device_frames=100", "server.chunked_prefill_size=8", "server.home_tokens=160", "server.overlap=false",
     "server.mixed_chunk=true", "server.radix_cache=false", "link.h2d_gbps=0.001", "link.d2h_gbps=0.001", "sparse.buffer_factor=1"],
)  # fmt: skip
def test_no_setting_does_nothing(session, assignment):
    baseline, changed = run_grid(session, parse_grid([assignment]))
    assert [s.end_ns for s in baseline.result.steps] != [s.end_ns for s in changed.result.steps]


def test_max_prefill_tokens_counts_without_chunks():
    """Six prompts of 20 tokens at once: 64 tokens take three of them (24 padded tokens each), 512 all."""
    session = Session(Server(make_meta(max_running_requests=8), [make_request(i, 0, 20, 4) for i in range(6)]).serve())
    _, few, many = run_grid(session, parse_grid(["server.chunked_prefill_size=-1", "server.max_prefill_tokens=64,512"]))
    assert [len(o.result.steps[0].batch.rows) for o in (few, many)] == [3, 6]


def test_a_smaller_buffer_admits_more_and_hits_less(session):
    """With few frames the buffer factor decides how many requests run together."""
    grid = parse_grid(["server.device_frames=250", "sparse.buffer_factor=1,8"])
    _, small, large = run_grid(session, grid)
    together = [max(len(s.batch.rows) for s in o.result.steps if s.batch.mode == "decode") for o in (small, large)]
    assert together[0] >= together[1]
    assert small.summary.pages.hits < large.summary.pages.hits


def test_measured_batches_refuse_server_settings(session: Session):
    with pytest.raises(ValueError, match="use --schedule modelled"):
        session.simulate(scenario(session.run.meta, [("server.overlap", False)]), schedule="recorded")


def test_an_unknown_policy_is_refused_by_name(served):
    server = served.meta.server.model_copy(update={"schedule_policy": "lpm"})
    session = Session(type(served)(served.meta.model_copy(update={"server": server}), served.requests, served.steps, served.events))
    assert not session.can_model
    assert session.simulate(schedule="recorded").finished == len(served.requests)
    with pytest.raises(ValueError, match="'lpm'"):
        session.simulate()
