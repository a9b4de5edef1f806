"""The link against hand-computed timelines and queueing theory."""

from __future__ import annotations

import random

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.link import Link


def serve(jobs: list[tuple[int, int, int]]) -> Link:
    """Submit (time, bytes, service) jobs, in order of time, and run to the end."""
    env = simpy.Environment()
    link = Link(env, "h2d")

    def source():
        for number, (at, nbytes, service) in enumerate(jobs):
            if at > env.now:
                yield env.timeout(at - env.now)
            link.submit(number, "demand", nbytes, service)

    env.process(source())
    env.run()
    return link


def test_first_in_first_out_by_hand():
    link = serve([(0, 10, 100), (20, 5, 30), (20, 1, 1), (500, 7, 9)])
    assert [(t.step, t.submit_ns, t.start_ns, t.end_ns) for t in link.transfers] == [
        (0, 0, 0, 100),
        (1, 20, 100, 130),
        (2, 20, 130, 131),
        (3, 500, 500, 509),
    ]
    assert link.busy_ns == 140


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000), st.integers(0, 60)), max_size=40))
def test_bytes_and_time_are_conserved(jobs):
    arrivals, at = [], 0
    for wait, nbytes, service in jobs:
        at += wait
        arrivals.append((at, nbytes, service))
    link = serve(arrivals)
    link.check_drained()
    assert link.submitted_bytes == sum(nbytes for _, nbytes, _ in jobs) == sum(t.nbytes for t in link.transfers)
    assert link.busy_ns == sum(service for _, _, service in jobs)
    free = 0
    for transfer in link.transfers:
        # Work conserving: a transfer starts when it is submitted or when the one before it ends.
        assert transfer.start_ns == max(free, transfer.submit_ns)
        free = transfer.end_ns


def test_waiting_time_of_m_d_1():
    """Poisson arrivals, constant service, rho 0.7: Wq = rho S / (2 (1 - rho))."""
    service, rho, waits = 1_000_000, 0.7, []
    for seed in range(4):
        rng = random.Random(seed)
        at, jobs = 0.0, []
        for _ in range(20_000):
            at += rng.expovariate(rho / service)
            jobs.append((round(at), 1, service))
        transfers = serve(jobs).transfers[2_000:]
        waits.append(sum(t.start_ns - t.submit_ns for t in transfers) / len(transfers))
    assert sum(waits) / len(waits) == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.04)


def test_a_negative_transfer_is_refused():
    with pytest.raises(ValueError, match="nbytes"):
        Link(simpy.Environment(), "h2d").submit(0, "demand", -1, 0)


def test_an_unfinished_transfer_is_noticed():
    link = Link(simpy.Environment(), "d2h")
    link.submit(0, "write", 8, 10)
    with pytest.raises(RuntimeError, match="8 bytes submitted, 0 completed"):
        link.check_drained()
