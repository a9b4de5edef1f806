"""Engines are shared: a start takes longer than most tests here. An idle one sleeps.

``--full`` runs the whole matrix of equality with dense SGLang; without it a part that covers every path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import MODEL, EngineProcess
from tests.engine.prompts import samples

pytest.importorskip("sglang", reason="sglang is not installed (extra 'serve')")

HOME_TOKENS = 30_000


@pytest.fixture(scope="session")
def model() -> Path:
    """The real model."""
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"the model is not built: python -m sglang_ext.demo.model {MODEL.relative_to(Path.cwd())}")
    return MODEL


@pytest.fixture(scope="session")
def dense(model: Path, full: bool) -> dict[str, list[list[int]]]:
    """What stock SGLang (``torch_native``, page 1) answers; its engine is gone before another one starts."""
    engine = EngineProcess(attention_backend="torch_native", max_total_tokens=HOME_TOKENS)
    try:
        return {
            name: [one["ids"] for one in engine.generate(sample.prompts, sample.new_tokens, sample.together)]
            for name, sample in samples(full).items()
        }
    finally:
        engine.close()


@pytest.fixture(scope="session")
def sparse(model: Path) -> Iterator[EngineProcess]:
    """A sparse engine to be reconfigured."""
    engine = EngineProcess(
        sparse_algorithm="quest", sparse_budget="8192", sparse_host_memory=str(HOME_TOKENS), sparse_device_memory=str(20_000), max_running_requests=16
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether ``--full`` was given."""
    return bool(request.config.getoption("--full"))
