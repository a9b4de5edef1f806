"""The figures of a report, as SVG: matplotlib without a display, and without anything that differs between two equal runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.engine import RequestTimes, SimResult
from simulator.metrics import PageTotals, tpots, ttfts
from simulator.session import Session
from simulator.whatif import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, SIMULATED, MODELLED = "#1f4e79", "#d9822b", "#5b8c5a"
BINS = 60


def figure(width: float = 9.0, height: float = 3.0) -> Figure:
    """An empty figure that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_svg(drawn: Figure) -> bytes:
    """``drawn`` as SVG bytes, the same for the same data."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "path"}):
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def latency_cdfs(series: Sequence[tuple[str, str, Sequence[RequestTimes]]]) -> Figure:
    """TTFT and TPOT distributions; ``series`` holds (label, colour, requests)."""
    drawn = figure()
    left, right = drawn.subplots(1, 2)
    for axes, name, values_of in ((left, "TTFT", ttfts), (right, "TPOT", tpots)):
        for label, colour, requests in series:
            values = np.sort(np.asarray(values_of(requests), np.float64)) / 1e6
            if len(values):
                axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colour, label=label)
        axes.set(xlabel=f"{name} (ms)", ylabel="share of requests", ylim=(0, 1.02))
        _finish(axes)
    return drawn


def step_times(session: Session) -> Figure:
    """Measured and predicted step time over the run; held-out steps are shaded."""
    steps, fitted = session.run.steps, session.fitted
    at = np.array([step.start_ns for step in steps]) / 1e9
    measured = np.array([step.end_ns - step.start_ns for step in steps]) / 1e6
    drawn = figure(height=3.4)
    axes = drawn.subplots()
    for begin, end in _stretches(fitted.held_out):
        axes.axvspan(at[begin], at[min(end, len(at) - 1)], color="#eeeeee", lw=0)
    axes.plot(at, measured, ".", ms=3, color=MEASURED, label="measured")
    axes.plot(at, fitted.predicted_ns / 1e6, ".", ms=3, color=SIMULATED, label="predicted")
    axes.set(xlabel="time (s)", ylabel="step (ms)", yscale="log")
    _finish(axes)
    return drawn


def hit_rates(measured: PageTotals, simulated: PageTotals) -> Figure:
    """Hit rate of each layer."""
    drawn = figure()
    axes = drawn.subplots()
    for totals, colour, shift, label in ((measured, MEASURED, -0.2, "measured"), (simulated, SIMULATED, 0.2, "simulated")):
        hits, misses = np.array(totals.hits_by_layer, np.float64), np.array(totals.misses_by_layer, np.float64)
        rate = np.divide(hits, hits + misses, out=np.ones_like(hits), where=hits + misses > 0)
        axes.bar(np.arange(len(rate)) + shift, rate, 0.4, color=colour, label=label)
    axes.set(xlabel="layer", ylabel="hit rate", ylim=(0, 1.05))
    _finish(axes)
    return drawn


def link_bytes(session: Session, result: SimResult) -> Figure:
    """Bytes of each class over time: measured above, simulated below, on one scale."""
    steps = session.run.steps
    measured = {name: [sum(getattr(step, f"{name}_bytes")) for step in steps] for name in ("demand", "prefix", "write")}
    simulated = {name: [int(getattr(step.work, name).sum()) for step in result.steps] for name in ("demand", "prefix", "write")}
    drawn = figure(height=4.2)
    rows = drawn.subplots(2, 1, sharex=True, sharey=True)
    end = max(steps[-1].end_ns, result.horizon_ns)
    edges = np.linspace(0, end, BINS + 1)
    sides = (("measured", [s.end_ns for s in steps], measured), ("simulated", [s.end_ns for s in result.steps], simulated))
    for axes, (label, times, classes) in zip(rows, sides, strict=True):
        values = [np.histogram(times, edges, weights=np.asarray(nbytes, np.float64))[0] / 1e6 for nbytes in classes.values()]
        axes.stackplot(edges[:-1] / 1e9, values, labels=list(classes), colors=("#b5482f", "#d9a441", "#6f8fae"), step="post")
        axes.set(ylabel=f"{label} (MB)")
        _finish(axes)
    rows[1].set(xlabel="time (s)")
    return drawn


def whatif_curve(outcomes: Sequence[Outcome]) -> Figure:
    """Hit rate and TPOT of each scenario, in the order of the table; the first one, as recorded, is the dashed line."""
    drawn = figure(height=3.4)
    baseline, others = outcomes[0], outcomes[1:]
    labels = [outcome.scenario.short_label for outcome in others]
    at = np.arange(len(labels))
    rates = [outcome.summary.pages.hit_rate for outcome in outcomes]
    tpot = [outcome.summary.tpot.mean / 1e6 for outcome in outcomes]
    for axes, name, values, colour in zip(
        drawn.subplots(1, 2), ("hit rate", "mean TPOT (ms)"), (rates, tpot), (MEASURED, SIMULATED), strict=True
    ):
        axes.plot(at, values[1:], "o-", color=colour)
        axes.axhline(values[0], color="#888888", ls="--", lw=1, label=baseline.scenario.label)
        axes.set(ylabel=name)
        axes.set_xticks(at, labels, rotation=30, ha="right", fontsize=7)
        axes.ticklabel_format(axis="y", useOffset=False)
        _finish(axes)
    return drawn


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def _stretches(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
