"""Nanoseconds of a step and of the gap before it: a sum of phases, each linear in features that mean something.

    step = index + offload + select + retrieve + attend + rest of the model + rest of the step (sampling, preparing)
    gap  = the scheduler between two steps, when there is work

Steps without and with prefill have their own coefficients. The part of retrieve that grows with pages, and of offload that grows
with tokens, is time on the link; what is left of them is lookup and launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.work import FEATURES, StepWork, Vector
from traces.schema import PHASES

MODEL = "model"
"""What is left of the forward pass after the measured phases."""
OUTSIDE = "outside"
"""What is left of the step after the forward pass."""
GAP = "gap"
STEP_PHASES = (*PHASES, MODEL, OUTSIDE)

PHASE_FEATURES: dict[str, tuple[str, ...]] = {
    "index": ("step", "decode_rows", "prefill_tokens"),
    "offload": ("step", "decode_rows", "prefill_tokens"),
    "select": ("step", "decode_rows", "scored_pages", "last_chunks"),
    "retrieve": ("step", "decode_rows", "selected_pages", "missed_pages", "prefix_pages"),
    "attend": ("step", "decode_rows", "selected_pages", "prefill_tokens", "prefill_area", "prefix_pages"),
    MODEL: ("step", "decode_rows", "prefill_tokens"),
    OUTSIDE: ("step", "decode_rows", "prefill_tokens"),
    GAP: ("step", "decode_rows", "prefill_tokens", "last_chunks"),
}
H2D_FEATURES = ("missed_pages", "prefix_pages")
D2H_FEATURES = ("decode_rows", "prefill_tokens")

DECODE = 0
PREFILL = 1


def kind_of(features: Vector) -> int:
    """``PREFILL`` for a step with prompt tokens, else ``DECODE``: which coefficients it takes."""
    return PREFILL if features[FEATURES.index("prefill_tokens")] > 0 else DECODE


class StepCost(NamedTuple):
    """Integer nanoseconds of one step. ``gpu`` holds every phase without the link's part; the step is ``gpu`` + ``h2d`` + ``d2h``."""

    gpu: tuple[int, ...]
    h2d: int
    d2h: int
    gap: int
    inside: bool

    @property
    def total(self) -> int:
        """The whole step, without the gap before it."""
        return sum(self.gpu) + self.h2d + self.d2h


@dataclass(frozen=True)
class KindCost:
    """Coefficients ``[phases, features]`` in nanoseconds a unit, the range ``[2, features]`` they were fitted in, and the step ratios
    (measured / predicted) of the fitted steps, with mean 1: the noise that a seeded run draws from."""

    coefficients: npt.NDArray[np.float64]
    fitted_range: npt.NDArray[np.float64]
    ratios: npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinkRates:
    """Bytes a nanosecond (= GB/s) of each direction; ``None`` keeps what the run measured."""

    h2d_gbps: float | None = None
    d2h_gbps: float | None = None


@dataclass
class CostModel:
    """Predicts :class:`StepCost`.

    Args:
        kinds: coefficients of decode-only steps and of steps with prefill.
        gaps: coefficients of the gap before a step of each kind ``[2, features]``.
        wake_ns: from an arrival at an idle scheduler to the launch of its first step.
        handoff_ns: from the end of a step to the time its processed tokens are handed on.
        rates: another link (a what-if).
    """

    kinds: tuple[KindCost, KindCost]
    gaps: npt.NDArray[np.float64]
    wake_ns: int
    handoff_ns: int
    rates: LinkRates = field(default_factory=LinkRates)

    def __post_init__(self) -> None:
        self._h2d = _mask(H2D_FEATURES)
        self._d2h = _mask(D2H_FEATURES)

    def of_step(self, work: StepWork, noise: float = 1.0) -> StepCost:
        """Cost of a step; every phase is multiplied by ``noise``. ``inside`` is false if a feature is out of the fitted range."""
        kind = kind_of(work.features)
        cost = self.kinds[kind]
        phases = cost.coefficients * work.features * noise
        by_phase = phases.sum(axis=1)
        h2d = float(phases[PHASES.index("retrieve")][self._h2d].sum())
        d2h = float(phases[PHASES.index("offload")][self._d2h].sum())
        by_phase[PHASES.index("retrieve")] -= h2d
        by_phase[PHASES.index("offload")] -= d2h
        low, high = cost.fitted_range
        inside = bool(((work.features >= low) & (work.features <= high)).all())
        return StepCost(
            tuple(max(0, round(value)) for value in by_phase),
            _link_ns(h2d, work.h2d_bytes, self.rates.h2d_gbps),
            _link_ns(d2h, work.d2h_bytes, self.rates.d2h_gbps),
            round(float(self.gaps[kind] @ work.features)),
            inside,
        )

    @property
    def decide_ns(self) -> int:
        """From the end of a step to the point at which the scheduler has received what arrived: the gap that every step has."""
        return round(float(self.gaps[:, FEATURES.index("step")].min(axis=None)))

    def draw(self, features: Vector, uniform: float) -> float:
        """Step ratio at quantile ``uniform`` in [0, 1) of the fitted steps' own ratios."""
        ratios = self.kinds[kind_of(features)].ratios
        return float(ratios[int(uniform * len(ratios))])


def _mask(names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.array([name in names for name in FEATURES])


def _link_ns(fitted: float, nbytes: int, gbps: float | None) -> int:
    if gbps is None:
        return max(0, round(fitted))
    return -int(-nbytes // gbps)  # a GB/s is a byte a nanosecond; rounded up, a transfer never beats its bandwidth
