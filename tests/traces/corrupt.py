"""Changes one thing in a run that was valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import SELECTION_SCHEMA, STEP_SCHEMA

Rows = dict[str, list[Any]]


def edit_meta(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the object of ``meta.json``."""
    meta = json.loads((run / "meta.json").read_text())
    change(meta)
    (run / "meta.json").write_text(json.dumps(meta))


def edit_request(run: Path, line: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the object in ``line`` (from 1) of ``requests.jsonl``."""
    lines = (run / "requests.jsonl").read_text().splitlines()
    record = json.loads(lines[line - 1])
    change(record)
    lines[line - 1] = json.dumps(record)
    (run / "requests.jsonl").write_text("\n".join(lines) + "\n")


def edit_rows(run: Path, name: str, change: Callable[[Rows], object]) -> None:
    """Apply ``change`` to the columns of a parquet file, which keeps its schema."""
    schema = {"steps": STEP_SCHEMA, "selections": SELECTION_SCHEMA}[name]
    path = run / f"{name}.parquet"
    rows = pq.read_table(path).to_pydict()
    change(rows)
    pq.write_table(pa.table(rows, schema=schema), path)


def edit_table(run: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replace the table of a parquet file, schema included."""
    path = run / f"{name}.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def truncate(path: Path, keep: float) -> None:
    """Cut a file to the share ``keep`` of its bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
