"""What every command of ``sglang-ext`` shares: its output and its exit codes.

With ``--json`` a command writes exactly one JSON object to stdout; logs, warnings and progress go to stderr in any case. Exit codes:
0 done, 1 a check failed, 2 wrong use: also an input that a ``ValueError`` refuses, told as ``error: ...`` without a traceback.

::

    @app.command()
    def count(path: Path, as_json: JsonFlag = False) -> None:
        with errors_as_exit(as_json):
            emit({"files": n}, as_json, lambda: f"{n} files")
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType

OK, FAILED, WRONG_USE = 0, 1, 2

JsonFlag = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]


def progress() -> Console:
    """Console for all that is not the result: stderr."""
    return Console(stderr=True)


def emit(result: Mapping[str, Any], as_json: bool, human: Callable[[], RenderableType]) -> None:
    """Write ``result`` to stdout: as JSON, or as ``human()`` shows it. Numbers that JSON lacks (NaN, infinity) become ``null``."""
    if as_json:
        typer.echo(json.dumps(_plain(result), allow_nan=False))
        return
    text = human()
    if isinstance(text, str):
        typer.echo(text)
    else:
        Console().print(text)


def fail(message: str, as_json: bool, code: int = WRONG_USE) -> NoReturn:
    """Tell ``message`` on stderr, with ``--json`` also as ``{"error": ...}`` on stdout, and exit with ``code``."""
    typer.echo(f"error: {message}", err=True)
    if as_json:
        typer.echo(json.dumps({"error": message}))
    raise typer.Exit(code)


@contextmanager
def errors_as_exit(as_json: bool) -> Iterator[None]:
    """Turn what the user's input causes (``ValueError``, a file that can't be opened) into exit code 2. Anything else is a bug and is raised."""
    try:
        yield
    except ValueError as error:
        fail(str(error), as_json)
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}", as_json)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
