"""The commands ``simulate``, ``compare`` and ``report`` of ``sglang-ext``; heavy imports happen inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from simulator.compare import Comparison
    from simulator.engine import SimResult
    from simulator.session import Session
    from simulator.whatif import Outcome

REPORT_GRID = "sparse.buffer_factor=1,2,3,5,8"
"""Scenarios of ``report`` without ``--set``."""

Source = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a recorded run.")]
Out = Annotated[Path | None, typer.Option("--out", help="Directory for tables, trace.json.gz and report.html.", file_okay=False)]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=A,B,C", help="Change a setting; several values give a table. Repeatable.")
]
ScheduleFlag = Annotated[
    Literal["modelled", "recorded"], typer.Option("--schedule", help="Run the scheduler model from the arrivals, or the measured batches.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Draw each step's cost from the spread of the fitted steps; without it, their mean.")
]
Tolerance = Annotated[float, typer.Option("--tolerance", min=0.0, help="Largest relative error of TPOT and makespan.")]


def register(app: typer.Typer) -> None:
    """Add the simulator's commands to ``app``; output and exit codes are those of every other command."""
    from sglang_ext.cli_output import FAILED, JsonFlag, emit, errors_as_exit

    # The flag's type is imported here, so it is not a global that the annotations below could be resolved from.
    json_flag: Any = JsonFlag

    def simulate(
        directory: Source,
        out: Out = None,
        changes: Set = None,
        schedule: ScheduleFlag = "modelled",
        seed: Seed = None,
        as_json: bool = False,
    ) -> None:
        """Replay a run through its own policies and predict its times; --set asks what if."""
        from simulator.tables import fit_line, idle_table, whatif_table

        with errors_as_exit(as_json):
            session, outcomes = _simulate(directory, changes or [], schedule, seed)
            result: dict[str, Any] = {"schedule": schedule, "seed": seed, "fit": session.fitted.report.as_dict()}
            result["scenarios"] = [outcome.as_dict() for outcome in outcomes]
            if out is not None:
                result["files"] = _write(out, session, outcomes, result, None)
            emit(result, as_json, lambda: _group(whatif_table(outcomes), idle_table(outcomes[-1]), fit_line(session.fitted.report)))

    def compare(directory: Source, out: Out = None, tolerance: Tolerance = 0.10, as_json: bool = False) -> None:
        """Hold the simulation against the measurement: pages and bytes exactly, TPOT and makespan within the tolerance (else exit 1)."""
        from simulator.tables import compare_tables

        with errors_as_exit(as_json):
            session, outcomes = _simulate(directory, [], None, None)
            comparison, recorded, modelled = _compare(session, tolerance)
            result = comparison.as_dict()
            if out is not None:
                result["files"] = _write(out, session, outcomes, result, (comparison, recorded, modelled))
            emit(result, as_json, lambda: compare_tables(comparison))
        if comparison.failures:
            raise typer.Exit(FAILED)

    def report(
        directory: Source,
        out: Annotated[Path, typer.Option("--out", help="Directory for report.html and the tables behind it.", file_okay=False)],
        changes: Set = None,
        as_json: bool = False,
    ) -> None:
        """Write report.html: comparison, figures and a what-if table (default: buffer factors)."""
        with errors_as_exit(as_json):
            session, outcomes = _simulate(directory, changes or [REPORT_GRID], None, None)
            compared = _compare(session, 0.10)
            result: dict[str, Any] = {**compared[0].as_dict(), "scenarios": [outcome.as_dict() for outcome in outcomes]}
            result["files"] = _write(out, session, outcomes, result, compared)
            emit({"files": result["files"], "ok": result["ok"]}, as_json, lambda: "\n".join(result["files"]))

    for command in (simulate, compare, report):
        command.__annotations__["as_json"] = json_flag
        app.command()(command)


def _simulate(
    directory: Path, assignments: list[str], schedule: Literal["modelled", "recorded"] | None, seed: int | None
) -> tuple[Session, list[Outcome]]:
    """Session of the run in ``directory``, and its scenarios; ``schedule`` ``None`` models where the model knows the run's policy."""
    from simulator.session import Session
    from simulator.settings import parse_grid
    from simulator.whatif import run_grid
    from traces.reader import read_run

    grid = parse_grid(assignments)
    with _progress() as report:
        session = Session(read_run(directory), report)
        chosen = schedule or ("modelled" if session.can_model else "recorded")
        return session, run_grid(session, grid, chosen, seed)


def _compare(session: Session, tolerance: float) -> tuple[Comparison, SimResult, SimResult | None]:
    from simulator.compare import compare

    recorded = session.simulate(schedule="recorded")
    modelled = session.simulate(schedule="modelled") if session.can_model else None
    return compare(session, recorded, modelled, tolerance), recorded, modelled


def _write(
    out: Path,
    session: Session,
    outcomes: list[Outcome],
    summary: dict[str, Any],
    compared: tuple[Comparison, SimResult, SimResult | None] | None,
) -> list[str]:
    """Write every result file; tables and trace are those of the last scenario."""
    from simulator import output
    from simulator.chrome import chrome_trace
    from simulator.report import render_report

    detail = outcomes[-1]
    comparison, recorded, modelled = compared or _compare(session, 0.10)
    files = {
        "summary.json": output.to_json(summary),
        "requests.csv": output.requests_csv(detail.result),
        "steps.csv": output.steps_csv(detail.result),
        "links.csv": output.links_csv(detail.result),
        "trace.json.gz": output.to_gzip(chrome_trace(session.run, detail.result, detail.scenario.label)),
        "report.html": render_report(session, comparison, recorded, modelled, outcomes),
    }
    if len(outcomes) > 1:
        files["whatif.csv"] = output.whatif_csv(outcomes)
    return [str(path) for path in output.write_files(out, files)]


def _group(*parts: Any) -> Any:
    from rich.console import Group

    return Group(*parts)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr; it draws nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield report
