"""Selection algorithms, by name."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from sglang_ext.config import ALGORITHMS, nearest

if TYPE_CHECKING:
    from sglang_ext.algorithms.base import SparseAlgorithm

GROUP = "sglang_ext.algorithms"


def algorithm_names() -> list[str]:
    """Built-in and third-party algorithms."""
    return [*ALGORITHMS, *sorted(point.name for point in entry_points(group=GROUP) if point.name not in ALGORITHMS)]


def check_algorithm(name: str) -> None:
    """Raise ``ValueError`` with the nearest name unless ``name`` is registered. Imports nothing heavy."""
    names = algorithm_names()
    if name not in names:
        raise ValueError(f"algorithm(={name!r}) is not known{nearest(name, names)} (known: {', '.join(names)})")


def create_algorithm(name: str) -> SparseAlgorithm:
    """An instance of algorithm ``name``. Raises ``ValueError`` for an unknown one."""
    check_algorithm(name)
    if name in ALGORITHMS:
        module, cls = ALGORITHMS[name].split(":")
        return getattr(import_module(module), cls)()  # type: ignore[no-any-return]
    (point,) = [point for point in entry_points(group=GROUP) if point.name == name]
    return point.load()()  # type: ignore[no-any-return]
