"""The cost fit: known coefficients come back, and the held-out report says what it should."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from simulator.cost import DECODE, PREFILL, STEP_PHASES, LinkRates
from simulator.fit import fit_costs, measured_phases, split
from simulator.session import Session
from simulator.settings import scenario
from simulator.tables import fit_line
from simulator.work import FEATURES, WorkModel
from simulator.workload import recorded_batches
from tests.simulator.runs import REAL, Server, make_meta, make_requests


def true_cost(features: np.ndarray) -> np.ndarray:
    return features @ REAL.kinds[0].coefficients.T


def test_known_coefficients_come_back(served):
    fitted = fit_costs(served)
    for batch, step in zip(recorded_batches(served.steps), served.steps, strict=True):
        features = WorkModel(served.meta).of_record(batch, step).features
        cost = fitted.model.of_step(WorkModel(served.meta).of_record(batch, step))
        assert cost.total == pytest.approx(true_cost(features).sum(), rel=1e-3)
    decode = fitted.model.kinds[DECODE].coefficients
    for phase, name, value in (("retrieve", "missed_pages", 900), ("select", "scored_pages", 150), ("attend", "selected_pages", 120)):
        assert decode[STEP_PHASES.index(phase), FEATURES.index(name)] == pytest.approx(value, rel=0.02)
    prefill = fitted.model.kinds[PREFILL].coefficients
    assert prefill[STEP_PHASES.index("model"), FEATURES.index("prefill_tokens")] == pytest.approx(12_000, rel=0.02)
    assert fitted.model.wake_ns == 50_000
    assert fitted.model.handoff_ns == 10_000


def test_held_out_error_is_that_of_steps_that_were_not_fitted(served):
    """Held-out steps that are 1.5x slower than the fitted ones must show as -1/3, in TPOT too; fitted ones must not matter."""
    held = fit_costs(served).held_out
    run = dataclasses.replace(served, steps=list(served.steps))
    shift = 0
    for i, step in enumerate(run.steps):
        slower = (step.end_ns - step.start_ns) // 2 if held[i] else 0
        phases = (
            {name: getattr(step, name) * 3 // 2 for name in ("index_ns", "offload_ns", "select_ns", "retrieve_ns", "attend_ns")}
            if slower
            else {}
        )
        forward = step.forward_ns * 3 // 2 if slower else step.forward_ns
        moved = {"start_ns": step.start_ns + shift, "end_ns": step.end_ns + shift + slower, "forward_ns": forward}
        run.steps[i] = step.model_copy(update={**moved, **phases})
        shift += slower
    report = fit_costs(run).report
    for kind in report.kinds:
        assert kind.error == pytest.approx(1 / 1.5 - 1, abs=0.01)
        assert kind.mape == pytest.approx(1 - 1 / 1.5, abs=0.01)
    assert report.tpot_error == pytest.approx(1 / 1.5 - 1, abs=0.03)  # the gaps did not change
    assert report.makespan_error is not None
    assert report.makespan_error < -0.25


def test_a_slow_first_step_is_left_out_of_the_fit_and_counted(served):
    run = dataclasses.replace(served, steps=list(served.steps))
    first = run.steps[0]
    late = 50 * (first.end_ns - first.start_ns)
    run.steps = [
        step.model_copy(update={"start_ns": step.start_ns + (late if i else 0), "end_ns": step.end_ns + late})
        for i, step in enumerate(run.steps)
    ]
    run.steps[0] = run.steps[0].model_copy(update={"forward_ns": first.forward_ns + late})
    fitted = fit_costs(run)
    assert fitted.report.kinds[PREFILL].left_out == 1
    assert fitted.report.kinds[PREFILL].error == pytest.approx(0, abs=0.01)


def test_phases_sum_to_the_step(served):
    sums = measured_phases(served.steps).sum(axis=1)
    assert sums.tolist() == [step.end_ns - step.start_ns for step in served.steps]


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40, 200])
@pytest.mark.parametrize("prefills", [1, 2, 5])
def test_both_halves_have_steps_of_both_kinds(count, prefills):
    kinds = np.array([PREFILL] * prefills + [DECODE] * count)
    held, blocks = split(kinds)
    for kind in (DECODE, PREFILL):
        mine = held[kinds == kind]
        assert not mine.all()
        if len(mine) > 1:
            assert mine.any()
    assert held.tolist() == split(kinds)[0].tolist()
    assert set(blocks) <= {1, 2, 4, 8}


def test_a_long_run_alternates_in_blocks_of_eight():
    held, blocks = split(np.zeros(64, np.int64))
    assert held.tolist() == ([False] * 8 + [True] * 8) * 4
    assert blocks[0] == 8


def test_steps_outside_the_fitted_range_are_counted(session):
    assert session.simulate().outside < len(session.simulate().steps) / 5
    wide = session.simulate(scenario(session.run.meta, [("server.chunked_prefill_size", 64)]))
    assert wide.outside > session.simulate().outside


def test_another_link_replaces_only_what_moved(served):
    model = fit_costs(served).model
    batches = recorded_batches(served.steps)
    works = [WorkModel(served.meta).of_record(batch, step) for batch, step in zip(batches, served.steps, strict=True)]
    other = dataclasses.replace(model, rates=LinkRates(h2d_gbps=2.0))
    for work in works:
        before, after = model.of_step(work), other.of_step(work)
        assert (before.gpu, before.d2h) == (after.gpu, after.d2h)
        assert after.h2d == -(-work.h2d_bytes // 2)


def test_a_run_without_decode_can_be_fitted():
    requests = [r.model_copy(update={"output_tokens": 1, "max_new_tokens": 1}) for r in make_requests(12)]
    run = Server(make_meta(overlap=False), requests).serve()
    session = Session(run)
    assert session.fitted.report.tpot_ns is None
    assert session.simulate().finished == 12


@pytest.mark.parametrize("empty", ["steps", "requests"])
def test_a_run_without_steps_or_requests_is_refused(served, empty):
    with pytest.raises(ValueError, match=r"no steps|does not list"):
        Session(dataclasses.replace(served, **{empty: []}))


def test_an_unsteady_machine_is_said_and_its_steps_are_kept(served):
    """A fifth of the steps 8x slower is no warm-up: leaving them out would predict a machine that nobody measured."""
    run = dataclasses.replace(served, steps=list(served.steps))
    shift = 0
    for i, step in enumerate(run.steps):
        stall = 7 * (step.end_ns - step.start_ns) if i % 5 == 3 else 0
        moved = {"start_ns": step.start_ns + shift, "end_ns": step.end_ns + shift + stall, "forward_ns": step.forward_ns + stall}
        run.steps[i] = step.model_copy(update=moved)
        shift += stall
    report = fit_costs(run).report
    for kind in report.kinds:
        assert kind.left_out == 0
        assert 0.1 < kind.unsteady < 0.3
    assert "Unsteady measurement" in fit_line(report)
    assert "Unsteady" not in fit_line(fit_costs(served).report)
