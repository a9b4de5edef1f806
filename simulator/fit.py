"""Fits a :class:`CostModel` from a run's own phase times, on one half of its steps, and says how well it does on the other half.

Blocks of 8 consecutive steps alternate between the halves; a kind of step that would miss one half takes smaller blocks. Each phase
is a non-negative least-squares fit, weighted by 1 / predicted step (relative errors, unbiased in the mean). A few steps beyond 4x or
below a quarter of the prediction (first-step warm-up) are left out of the fit, counted, and stay in the held-out error; when they are
more than a few, the machine itself was unsteady: then all are kept, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from simulator.cost import DECODE, GAP, PHASE_FEATURES, PREFILL, STEP_PHASES, CostModel, KindCost, LinkRates, kind_of
from simulator.timeline import Timeline, read_timeline
from simulator.work import FEATURES, WorkModel
from simulator.workload import RecordedRun, recorded_batches
from traces.schema import PHASES, StepRecord

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BLOCK = 8
OUTLIER = 4.0
FEW = 0.05
KINDS = ("decode", "prefill")


@dataclass(frozen=True)
class KindReport:
    """How steps of one kind were fitted. ``unsteady``: share of fitted steps that are 4x off while too many to be left out. Errors are of
    the held-out steps; ``None`` when there are none."""

    kind: str
    train_steps: int
    held_out_steps: int
    block: int
    left_out: int
    unsteady: float
    error: float | None
    mape: float | None
    coefficients: dict[str, dict[str, float]]
    phase_errors: dict[str, float | None]


@dataclass(frozen=True)
class FitReport:
    """The fit as a whole, on the held-out steps and the gaps before them.

    ``tpot_ns``: mean time between tokens, (step + gap) weighted by decoding rows, (measured, predicted). ``makespan_ns``: sum of steps
    and gaps, (measured, predicted).
    """

    kinds: tuple[KindReport, KindReport]
    tpot_ns: tuple[float, float] | None
    makespan_ns: tuple[float, float] | None
    gaps: int
    wake_ns: int
    handoff_ns: int

    @property
    def tpot_error(self) -> float | None:
        """Predicted / measured - 1 of TPOT; ``None`` without a held-out decode step."""
        return None if self.tpot_ns is None else self.tpot_ns[1] / self.tpot_ns[0] - 1

    @property
    def makespan_error(self) -> float | None:
        """Predicted / measured - 1 of the held-out time."""
        return None if self.makespan_ns is None else self.makespan_ns[1] / self.makespan_ns[0] - 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tpot_error": self.tpot_error, "makespan_error": self.makespan_error}


@dataclass(frozen=True)
class Fitted:
    """A cost model, its report, which steps were held out, and the predicted nanoseconds of every measured step."""

    model: CostModel
    report: FitReport
    held_out: Flags
    predicted_ns: Array


def measured_phases(steps: Sequence[StepRecord]) -> Array:
    """``[steps, STEP_PHASES]`` nanoseconds; the rows sum to the step's duration."""
    rows = []
    for step in steps:
        phases = [float(getattr(step, f"{phase}_ns")) for phase in PHASES]
        rows.append([*phases, step.forward_ns - sum(phases), step.end_ns - step.start_ns - step.forward_ns])
    return np.array(rows, np.float64).reshape(len(steps), len(STEP_PHASES))


def split(kinds: npt.NDArray[np.int64]) -> tuple[Flags, tuple[int, int]]:
    """Which steps are held out, and the block of each kind.

    Blocks of ``BLOCK`` consecutive steps alternate. A kind with fewer than a quarter of its steps on one side is split by its own
    steps, in blocks that are halved until both sides have theirs.
    """
    index = np.arange(len(kinds))
    held = index // BLOCK % 2 == 1
    blocks = [BLOCK, BLOCK]
    for kind in (DECODE, PREFILL):
        mine = np.flatnonzero(kinds == kind)
        block = BLOCK
        while block > 1 and len(mine) > 1 and not 0.25 <= held[mine].mean() <= 0.75:
            held[mine] = np.arange(len(mine)) // block % 2 == 1
            if not 0.25 <= held[mine].mean() <= 0.75:
                block //= 2
                held[mine] = np.arange(len(mine)) // block % 2 == 1
        if len(mine) == 1:
            held[mine] = False
        blocks[kind] = block
    return held, (blocks[0], blocks[1])


def fit_costs(run: RecordedRun, rates: LinkRates | None = None) -> Fitted:
    """Fit ``run``. Raises ``ValueError`` if it has no step to fit."""
    batches = recorded_batches(run.steps)
    work = WorkModel(run.meta)
    features = np.array([work.of_record(batch, step).features for batch, step in zip(batches, run.steps, strict=True)])
    measured = measured_phases(run.steps)
    kinds = np.array([kind_of(row) for row in features], np.int64)
    held, blocks = split(kinds)
    timeline = read_timeline(run, batches)
    predicted = np.zeros_like(measured)
    models: list[KindCost] = []
    left_out, unsteady = [0, 0], [0.0, 0.0]
    for kind in (DECODE, PREFILL):
        mine = kinds == kind
        # A run without one kind (nothing decodes when every request asks for one token) takes the other's coefficients.
        train = mine & ~held if (mine & ~held).any() else ~held
        cost, left_out[kind], unsteady[kind] = _fit_kind(features[train], measured[train])
        models.append(cost)
        predicted[mine] = features[mine] @ cost.coefficients.T
    gaps = _fit_gaps(features, kinds, held, timeline)
    model = CostModel((models[0], models[1]), gaps, timeline.wake_ns, timeline.handoff_ns, rates or LinkRates())
    report = _report(features, kinds, held, blocks, measured, predicted, models, list(zip(left_out, unsteady)), model, timeline)
    return Fitted(model, report, held, predicted.sum(axis=1))


def non_negative(features: Array, target: Array, weights: Array, names: Sequence[str]) -> Array:
    """Weighted NNLS on the named columns; ``[FEATURES]`` coefficients, 0 for columns that are absent or constant zero."""
    columns = [index for index, name in enumerate(FEATURES) if name in names and features[:, index].any()]
    out = np.zeros(len(FEATURES))
    if not columns or not len(target):
        return out
    design = features[:, columns]
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale * weights[:, None], target * weights)
    out[columns] = solution / scale
    return out


def _fit_kind(features: Array, measured: Array) -> tuple[KindCost, int, float]:
    """Coefficients of one kind of step; how many steps were left out as outliers; their share when they are too many for that."""
    total = measured.sum(axis=1)
    # 1/measured is blind to slow outliers but low in the mean: it finds them, and 1/predicted fits the rest.
    weights = 1 / np.maximum(total, 1.0)
    keep = np.ones(len(total), bool)
    unsteady = 0.0
    for _ in range(3):
        guess = features @ non_negative(features[keep], total[keep], weights[keep], FEATURES)
        guess = np.maximum(guess, 1.0)
        ratio = total / guess
        keep = (ratio < OUTLIER) & (ratio > 1 / OUTLIER)
        if unsteady or (~keep).sum() > max(1, FEW * len(keep)):
            unsteady = unsteady or float((~keep).mean())
            keep[:] = True
        weights = 1 / guess
    rows = [non_negative(features[keep], measured[keep, i], weights[keep], PHASE_FEATURES[phase]) for i, phase in enumerate(STEP_PHASES)]
    coefficients = np.array(rows)
    ratios = total[keep] / np.maximum((features[keep] @ coefficients.T).sum(axis=1), 1.0)
    fitted_range = np.array([features.min(axis=0), features.max(axis=0)])
    return KindCost(coefficients, fitted_range, np.sort(ratios / ratios.mean())), int((~keep).sum()), unsteady


def _fit_gaps(features: Array, kinds: npt.NDArray[np.int64], held: Flags, timeline: Timeline) -> Array:
    gaps = []
    for kind in (DECODE, PREFILL):
        train = timeline.busy & (kinds == kind) & ~held
        if not train.any():
            train = timeline.busy & ~held
        gap = timeline.gap_ns[train]
        limit = OUTLIER * np.median(gap) if len(gap) else 0.0
        keep = gap <= max(limit, 1.0)
        gaps.append(non_negative(features[train][keep], gap[keep], np.ones(int(keep.sum())), PHASE_FEATURES[GAP]))
    return np.array(gaps)


def _report(
    features: Array,
    kinds: npt.NDArray[np.int64],
    held: Flags,
    blocks: tuple[int, int],
    measured: Array,
    predicted: Array,
    models: Sequence[KindCost],
    outliers: Sequence[tuple[int, float]],
    model: CostModel,
    timeline: Timeline,
) -> FitReport:
    reports = []
    for kind in (DECODE, PREFILL):
        mine = kinds == kind
        test = mine & held
        m, p = measured[test].sum(axis=1), predicted[test].sum(axis=1)
        phase_errors = {phase: _error(measured[test, i].sum(), predicted[test, i].sum()) for i, phase in enumerate(STEP_PHASES)}
        reports.append(
            KindReport(
                KINDS[kind],
                int((mine & ~held).sum()),
                int(test.sum()),
                blocks[kind],
                *outliers[kind],
                _error(m.sum(), p.sum()),
                float(np.abs(p / np.maximum(m, 1) - 1).mean()) if len(m) else None,
                _named(models[kind], model.gaps[kind]),
                phase_errors,
            )
        )
    rows = features[:, FEATURES.index("decode_rows")]
    gap = np.where(timeline.busy, timeline.gap_ns, 0.0)
    predicted_gap = np.where(timeline.busy, [features[i] @ model.gaps[kinds[i]] for i in range(len(kinds))], 0.0)
    m, p = measured.sum(axis=1) + gap, predicted.sum(axis=1) + predicted_gap
    weight = (rows * held).sum()
    tpot = (float((m * rows * held).sum() / weight), float((p * rows * held).sum() / weight)) if weight else None
    makespan = (float(m[held].sum()), float(p[held].sum())) if held.any() else None
    return FitReport((reports[0], reports[1]), tpot, makespan, int((timeline.busy & held).sum()), model.wake_ns, model.handoff_ns)


def _error(measured: float, predicted: float) -> float | None:
    return float(predicted / measured - 1) if measured > 0 else None


def _named(cost: KindCost, gap: Array) -> dict[str, dict[str, float]]:
    named = {}
    for phase, row in zip((*STEP_PHASES, GAP), (*cost.coefficients, gap), strict=True):
        named[phase] = {name: float(value) for name, value in zip(FEATURES, row, strict=True) if value > 0}
    return named
