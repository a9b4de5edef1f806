"""What-if settings: ``--set key=a,b,c`` over the configuration that a run was recorded with.

A replay can change what follows from recorded selections (how many frames, who is admitted, how fast the link is). It can't change
what selected the pages: those keys are refused with the reason.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from simulator.cost import LinkRates
from traces.schema import RunMeta, ServerShape, SparseShape

Value: TypeAlias = int | float | bool


@dataclass(frozen=True)
class Setting:
    """One key: its type, its smallest value, what it does."""

    kind: type
    low: float
    help: str


SETTINGS: dict[str, Setting] = {
    "sparse.buffer_factor": Setting(float, 1, "frames a row in multiples of the pages that a step attends"),
    "server.device_frames": Setting(int, 1, "frames of the device tier"),
    "server.home_tokens": Setting(int, 1, "logical tokens that home holds"),
    "server.max_running_requests": Setting(int, 1, "requests that decode together"),
    "server.chunked_prefill_size": Setting(int, -1, "tokens a prefill batch, a multiple of the page size; -1 is off"),
    "server.max_prefill_tokens": Setting(int, 1, "prompt tokens a batch without chunked prefill"),
    "server.overlap": Setting(bool, 0, "process results one step late"),
    "server.mixed_chunk": Setting(bool, 0, "decode in prefill batches"),
    "server.radix_cache": Setting(bool, 0, "reuse prefixes"),
    "link.h2d_gbps": Setting(float, 0, "GB/s from home to the device, in place of the measured time"),
    "link.d2h_gbps": Setting(float, 0, "GB/s from the device to home, in place of the measured time"),
}


@dataclass(frozen=True)
class Scenario:
    """One configuration to simulate: the run's own with ``changes`` applied."""

    meta: RunMeta
    rates: LinkRates = field(default_factory=LinkRates)
    changes: tuple[tuple[str, Value], ...] = ()

    @property
    def label(self) -> str:
        """The changes in words."""
        return ", ".join(f"{key}={spell(value)}" for key, value in self.changes) or "as recorded"

    @property
    def short_label(self) -> str:
        """The changes without the part that a key begins with."""
        return ", ".join(f"{key.partition('.')[2]}={spell(value)}" for key, value in self.changes) or "as recorded"

    @property
    def needs_model(self) -> bool:
        """Whether a change alters the schedule, which replaying the measured batches would ignore."""
        return any(key.startswith("server.") for key, _ in self.changes)


def parse_grid(assignments: Sequence[str]) -> list[tuple[tuple[str, Value], ...]]:
    """All combinations of ``key=a,b,c`` assignments, the last key fastest; ``[()]`` for none.

    Raises:
        ValueError: for a key that is unknown, fixed by the recording or given twice, and for a value that is not possible.
    """
    axes: list[list[tuple[str, Value]]] = []
    seen: set[str] = set()
    for assignment in assignments:
        key, equals, values = assignment.partition("=")
        key = key.strip()
        if not equals or not values.strip():
            raise ValueError(f"--set {assignment!r}: expected key=value or key=a,b,c")
        setting = _lookup(key)
        if key in seen:
            raise ValueError(f"--set {key}: given twice; list the values once, as {key}=a,b,c")
        seen.add(key)
        axes.append([(key, _parse(key, setting, text.strip())) for text in values.split(",")])
    return list(itertools.product(*axes))


def scenario(meta: RunMeta, changes: Sequence[tuple[str, Value]]) -> Scenario:
    """Apply ``changes`` to ``meta``. Raises ``ValueError`` for a combination that the server would refuse."""
    parts: dict[str, dict[str, Value]] = {"sparse": {}, "server": {}, "link": {}}
    for key, value in changes:
        part, name = key.split(".", 1)
        parts[part][name] = value
    changed = meta.model_copy(
        update={
            "server": meta.server.model_copy(update=parts["server"]),
            "sparse": meta.sparse.model_copy(update=parts["sparse"]),
        }
    )
    chunk, page = changed.server.chunked_prefill_size, changed.server.page_size
    if chunk > 0 and chunk % page:
        raise ValueError(f"server.chunked_prefill_size(={chunk}) must be a multiple of the run's page size {page}, or -1 for off")
    if changed.server.home_tokens < page:
        raise ValueError(f"server.home_tokens(={changed.server.home_tokens}) must hold a page of {page} tokens")
    rates = LinkRates(**{name: float(value) for name, value in parts["link"].items()})
    return Scenario(changed, rates, tuple(changes))


def _lookup(key: str) -> Setting:
    setting = SETTINGS.get(key)
    if setting is not None:
        return setting
    part, _, name = key.partition(".")
    recorded: dict[str, Any] = {"sparse": SparseShape.model_fields, "server": ServerShape.model_fields}
    if name in recorded.get(part, {}):
        raise ValueError(f"--set {key}: fixed by the recording, a replay can't change it; record a run with another value. {_allowed()}")
    near = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.5)
    raise ValueError(f"--set {key}: unknown key{f', did you mean {near[0]}?' if near else '.'} {_allowed()}")


def _allowed() -> str:
    return "Keys: " + ", ".join(SETTINGS)


def _parse(key: str, setting: Setting, text: str) -> Value:
    if setting.kind is bool:
        if text not in ("true", "false", "1", "0"):
            raise ValueError(f"--set {key}={text}: expected true or false")
        return text in ("true", "1")
    try:
        value = setting.kind(text)
    except ValueError:
        raise ValueError(f"--set {key}={text}: expected {'a whole number' if setting.kind is int else 'a number'}") from None
    above = value > setting.low if key.startswith("link.") else value >= setting.low
    off = key == "server.chunked_prefill_size" and value == 0
    if not above or off or not math.isfinite(value):
        sign = ">" if key.startswith("link.") else ">="
        wanted = "a multiple of the page size, or -1 for off" if off else f"{sign} {setting.low:g}"
        raise ValueError(f"--set {key}={text}: must be {wanted} ({setting.help})")
    return int(value) if setting.kind is int else float(value)


def spell(value: Value) -> str:
    """``value`` as it is written after ``--set``."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
