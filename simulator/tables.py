"""What the commands print, as rich tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from simulator.compare import Comparison
from simulator.fit import FitReport
from simulator.settings import spell
from simulator.whatif import Outcome


def milliseconds(ns: float) -> str:
    """Nanoseconds in milliseconds, or seconds from one up; four digits."""
    return f"{ns / 1e6:,.4g} ms" if ns < 1e9 else f"{ns / 1e9:,.4g} s"


def percent(error: float | None) -> str:
    """A signed relative error."""
    return "-" if error is None else f"{error:+.1%}"


def bytes_of(count: int) -> str:
    """Decimal bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def compare_tables(comparison: Comparison) -> Group:
    """Exact counts, times, and how the costs were fitted."""
    exact = Table("pages and bytes", "measured", "simulated", "", title="Recorded batches: must be equal", title_justify="left")
    for line in comparison.exact:
        exact.add_row(line.name, f"{line.measured:,}", f"{line.simulated:,}", "equal" if line.equal else f"[red]{line.first}[/red]")
    rates = comparison.measured.pages.hit_rate, comparison.recorded.pages.hit_rate
    exact.add_row("hit rate", *(f"{rate:.4f}" for rate in rates), "")
    times = Table("time", "of", "measured", "simulated", "error", title=f"Tolerance {comparison.tolerance:.0%}", title_justify="left")
    for timing in comparison.timings:
        wrong = timing.checked and timing.error is not None and abs(timing.error) > comparison.tolerance
        error = percent(timing.error) if timing.checked else f"({percent(timing.error)})"
        times.add_row(
            timing.name,
            timing.scope,
            milliseconds(timing.measured),
            milliseconds(timing.simulated),
            f"[red]{error}[/red]" if wrong else error,
        )
    notes = [fit_line(comparison.fit), *_range_lines(comparison)]
    verdict = "[red]not within: " + "; ".join(comparison.failures) + "[/red]" if comparison.failures else "all within"
    return Group(exact, times, *notes, "Errors in parentheses are shown, not checked.", verdict)


def _range_lines(comparison: Comparison) -> list[str]:
    recorded, modelled = comparison.outside
    lines = [f"Steps outside the fitted range: {recorded} recorded" + ("" if modelled is None else f", {modelled} modelled") + "."]
    if comparison.unrecorded:
        lines.append(
            f"Decode rows of the modelled schedule without a recorded selection: {comparison.unrecorded} (they take their request's last)."
        )
    if modelled is None:
        lines.append("No modelled schedule: the model knows schedule_policy 'fcfs' only.")
    return lines


def fit_line(fit: FitReport) -> str:
    """The fit in one line a kind of step."""
    lines = []
    for kind in fit.kinds:
        mape = "-" if kind.mape is None else f"{kind.mape:.1%}"
        lines.append(
            f"Costs, {kind.kind}: {kind.train_steps} steps fitted ({kind.left_out} left out), {kind.held_out_steps} held out in blocks of "
            f"{kind.block}: error {percent(kind.error)}, a step {mape}"
        )
        if kind.unsteady:
            lines.append(
                f"  Unsteady measurement: {kind.unsteady:.0%} of these steps took 4x more or less than their kind. Was the machine shared? "
                f"Times of this run predict nothing but a run under the same load."
            )
    return "\n".join(lines)


def whatif_table(outcomes: Sequence[Outcome]) -> RenderableType:
    """One line a scenario, one column a changed setting; the first line is the run as it was recorded."""
    keys = list(dict.fromkeys(key for outcome in outcomes for key, _ in outcome.scenario.changes))
    table = Table(title="Simulated", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for key in keys:
        table.add_column(key.partition(".")[2].replace("_", " "), justify="right")
    for name in ("hit rate", "demand", "TPOT", "TTFT", "makespan", "tok/s", "refused", "outside"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        summary, result = outcome.summary, outcome.result
        changed = dict(outcome.scenario.changes)
        table.add_row(
            *(spell(changed[key]) if key in changed else "as is" for key in keys),
            *(f"{summary.pages.hit_rate:.4f}", bytes_of(summary.pages.demand_bytes)),
            *(milliseconds(summary.tpot.mean), milliseconds(summary.ttft.mean), milliseconds(summary.makespan_ns)),
            *(f"{summary.tokens_per_second:,.0f}", str(result.refused), f"{result.outside}/{len(result.steps)}"),
        )
    notes = [
        "TPOT, TTFT: means. outside: steps whose features lie outside the range that the costs were fitted in; read their times with care."
    ]
    unrecorded = sum(outcome.result.unrecorded for outcome in outcomes)
    if unrecorded:
        notes.append(f"{unrecorded} decode rows have no recorded selection and take their request's last one.")
    return Group(table, *notes)


def idle_table(outcome: Outcome) -> RenderableType:
    """What the GPU did with its time."""
    table = Table("GPU", "time", "share", title=f"GPU time, {outcome.scenario.label}", title_justify="left")
    horizon = max(outcome.result.horizon_ns, 1)
    for name, ns in (("busy", outcome.result.busy_ns), *((f"idle: {cause}", ns) for cause, ns in outcome.result.idle_ns.items())):
        table.add_row(name, milliseconds(ns), f"{ns / horizon:.1%}")
    return table
