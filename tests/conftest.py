"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--full``: the whole matrix of equality with dense SGLang."""
    parser.addoption("--full", action="store_true", help="run the whole matrix of equality with dense SGLang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests say why they are skipped."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
