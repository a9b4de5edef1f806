"""The command line ``sglang-ext``. Importing this module imports neither torch nor sglang; commands import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from sglang_ext import __version__
from sglang_ext.cli_output import FAILED, JsonFlag, emit, errors_as_exit

SHOWN = 50
"""Problems that ``trace validate`` prints; ``--json`` has them all."""

RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a recorded run.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-ext {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application with all its commands."""
    from simulator.cli import register

    app = typer.Typer(
        name="sglang-ext",
        help="Sparse attention over host-resident KV for SGLang: traces, simulation, diagnosis.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _main(
        version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
    ) -> None:
        pass

    app.add_typer(trace_app(), name="trace")
    app.command()(doctor)
    register(app)
    return app


def trace_app() -> typer.Typer:
    """The commands ``trace info`` and ``trace validate``."""
    app = typer.Typer(help="Look at recorded runs.", no_args_is_help=True, pretty_exceptions_enable=False)
    app.command("info")(trace_info)
    app.command("validate")(trace_validate)
    return app


def trace_info(
    directory: RunDirectory,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Read also a run that was never closed, as far as it was written.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Summarise a run: requests, tokens, latencies, hits, link bytes."""
    from traces.info import describe
    from traces.reader import read_run

    with errors_as_exit(as_json):
        summary = describe(read_run(directory, allow_incomplete=allow_incomplete))
        emit(summary, as_json, lambda: _summary(summary))


def trace_validate(directory: RunDirectory, as_json: JsonFlag = False) -> None:
    """Check a run's files, and what they say about each other. Exit code 1 if something is wrong."""
    from traces.validate import validate_run

    with errors_as_exit(as_json):
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory that holds a run")
        problems = validate_run(directory)
        found = [{"file": p.file, "row": p.row, "field": p.field, "message": p.message} for p in problems]
        lines = [str(problem) for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"... and {len(problems) - SHOWN} more (--json lists them all)")
        emit({"path": str(directory), "valid": not problems, "problems": found}, as_json, lambda: "\n".join(lines) or "valid")
    if problems:
        raise typer.Exit(FAILED)


def doctor(as_json: JsonFlag = False) -> None:
    """Report on this machine: versions, devices, and what would keep the plug-in from serving."""
    from sglang_ext.doctor import render, run_doctor

    with errors_as_exit(as_json):
        report = run_doctor()
        emit(report, as_json, lambda: render(report))


def _summary(summary: dict[str, Any]) -> Group:
    table = Table(show_header=False, box=None)
    for name, value in summary.items():
        if name != "hit_rate_by_layer":
            table.add_row(name, _cell(value))
    layers = Table("layer", "hit rate", box=None)
    for layer, rate in enumerate(summary["hit_rate_by_layer"]):
        layers.add_row(str(layer), _cell(rate))
    return Group(table, layers)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_cell(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> None:
    """Entry point of the console script."""
    build_app()()
