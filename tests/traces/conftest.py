"""A valid run, made once and copied for every test that changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trace_factory import make_run


@pytest.fixture(scope="session")
def valid_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing may change."""
    return make_run(tmp_path_factory.mktemp("valid") / "run")


@pytest.fixture
def run_copy(valid_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(valid_run, tmp_path / "run"))
