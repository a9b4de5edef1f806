"""Runs that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.session import Session
from tests.simulator.runs import MemoryRun, Server, make_meta, make_requests
from tests.trace_factory import TraceSpec, make_run
from traces.reader import read_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on disk whose hits come from the serving policies, not from the simulator."""
    return make_run(tmp_path_factory.mktemp("sim") / "run", TraceSpec(requests=14, seed=4))


@pytest.fixture(scope="session")
def disk_session(run_dir: Path) -> Session:
    return Session(read_run(run_dir))


@pytest.fixture(scope="session")
def served() -> MemoryRun:
    """A run of the made-up server with overlap scheduling."""
    return Server(make_meta(), make_requests(40)).serve()


@pytest.fixture(scope="session")
def session(served: MemoryRun) -> Session:
    return Session(served)
