"""Reads and checks the files of a run one by one. Every function takes a ``report``: the reader refuses at the first finding, the
validator collects them and goes on with what is whole."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from traces import SCHEMA_VERSION
from traces.columns import Group, check_not_negative, groups
from traces.layout import META, REQUESTS, STEPS, parts_of
from traces.problems import Problem, Report, TraceError, of_validation, refuse, report_rows
from traces.schema import STEP_SCHEMA, RequestRecord, RunMeta, StepRecord

BY_REQUEST = ("prefix_tokens", "new_tokens", "decoding")
BY_LAYER = ("selected", "hits", "misses", "born", "demand_bytes", "prefix_bytes", "write_bytes")
_HASH = re.compile(r"[0-9a-f]{16}")


def load_meta(directory: Path) -> RunMeta:
    """Read ``meta.json``. Raises :class:`TraceError`: without it nothing else can be understood."""
    if not directory.is_dir():
        refuse(Problem(str(directory), None, None, "expected a directory that holds a run"))
    try:
        text = (directory / META).read_bytes()
    except OSError as error:
        refuse(Problem(META, None, None, f"expected a run directory with {META}, which can't be read ({error.strerror})"))
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(Problem(META, None, None, f"not JSON ({error})"))
    if not isinstance(raw, dict):
        refuse(Problem(META, None, None, f"expected an object, found {type(raw).__name__}"))
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool | float):
        refuse(Problem(META, None, "schema_version", f"expected {SCHEMA_VERSION}, found {version!r}: read it with the release that wrote it"))
    try:
        meta = RunMeta.model_validate_json(text, strict=True)
    except ValidationError as error:
        refuse(of_validation(META, None, error)[0])
    for name, value in _numbers(meta, ""):
        if not math.isfinite(value):
            refuse(Problem(META, None, name, f"expected a finite number, found {value}"))
    for name in ("sparse.budget", "sparse.buffer_factor", *(f"totals.{key}" for key in meta.totals)):
        if (value := dict(_numbers(meta, "")).get(name, 0)) < 0:
            refuse(Problem(META, None, name, f"expected a number >= 0, found {value}"))
    return meta


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def load_requests(directory: Path, meta: RunMeta, report: Report) -> list[RequestRecord]:
    """Read ``requests.jsonl``, sorted by id; bad lines are reported and left out. A torn last line of an unfinished run is only warned about."""
    try:
        lines = (directory / REQUESTS).read_bytes().split(b"\n")
    except OSError as error:
        report(Problem(REQUESTS, None, None, f"expected one line a request; the file can't be read ({error.strerror})"))
        return []
    rest = lines.pop()
    if rest:
        if meta.complete:
            report(Problem(REQUESTS, len(lines) + 1, None, "the last line does not end; the file was cut"))
        else:
            warnings.warn(f"{directory / REQUESTS}: line {len(lines) + 1} is torn and left out", stacklevel=2)
    records: dict[int, RequestRecord] = {}
    lines_of: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = RequestRecord.model_validate_json(line, strict=True)
        except ValidationError as error:
            for problem in of_validation(REQUESTS, number, error):
                report(problem)
            continue
        if record.id in records:
            report(Problem(REQUESTS, number, "id", f"request {record.id} is in line {lines_of[record.id]} already"))
            continue
        for problem in _check_request(record, number):
            report(problem)
        records[record.id] = record
        lines_of[record.id] = number
    return [records[key] for key in sorted(records)]


def _check_request(record: RequestRecord, line: int) -> Iterator[Problem]:
    last, last_name = record.arrival_ns, "arrival_ns"
    for name in ("scheduled_ns", "first_token_ns", "finish_ns"):
        value = getattr(record, name)
        if value is None:
            continue
        if value < last:
            yield Problem(REQUESTS, line, name, f"expected a time >= {last_name} (= {last}), found {value}")
        else:
            last, last_name = value, name
    if record.status == "finished":
        for name in ("scheduled_ns", "first_token_ns", "finish_ns"):
            if getattr(record, name) is None:
                yield Problem(REQUESTS, line, name, "expected a time for a finished request, found null")
    for at, text in enumerate(record.page_hashes):
        if not _HASH.fullmatch(text):
            yield Problem(REQUESTS, line, f"page_hashes.{at}", f"expected 16 hex digits, found {text!r:.40}")


def files_of(directory: Path, name: str, meta: RunMeta) -> list[str]:
    """The files that hold the rows of ``name``: itself once the run was closed, else its parts. Raises :class:`TraceError` without any."""
    parts = parts_of(directory, name)
    # A close that was cut off leaves both: the parts count until the head says that they were joined.
    if meta.complete and ((directory / name).exists() or not parts.is_dir()):
        return [name]
    if not parts.is_dir():
        refuse(Problem(parts.name, None, None, "missing; expected the parts of an unfinished run"))
    return [f"{parts.name}/{part.name}" for part in sorted(parts.glob("*.parquet"))]


def load_steps(directory: Path, meta: RunMeta, known: Collection[int] | None, report: Report) -> list[StepRecord]:
    """Read the steps in file order; bad rows are reported and left out.

    Args:
        directory: of the run.
        meta: its head.
        known: ids of the requests that there are; ``None`` when a request may lack its record (an unfinished run).
        report: takes the findings.
    """
    records: list[StepRecord] = []
    last_step, last_start = -1, 0
    try:
        files = files_of(directory, STEPS, meta)
    except TraceError as error:
        report(error.problem)
        return records
    for group in groups(directory, files, STEP_SCHEMA, STEP_SCHEMA.names, report):
        bad = check_not_negative(group, report) | _check_lengths(group, meta, report) | _check_order(group, last_step, last_start, report)
        if known is not None:
            bad |= _check_known(group, known, report)
        rows = zip(*(column.tolist() for column in group.columns.values()))
        for row, values in enumerate(rows):
            if row in bad:
                continue
            try:
                records.append(StepRecord.model_validate(dict(zip(group.columns, values))))
            except ValidationError as error:
                for problem in of_validation(group.file, group.first_row + row, error):
                    report(problem)
        if group.rows:
            last_step = int(group.columns["step"].values[-1])
            last_start = int(group.columns["start_ns"].values[-1])
    return records


def _check_lengths(group: Group, meta: RunMeta, report: Report) -> set[int]:
    rows: set[int] = set()
    batch = group.columns["requests"].lengths
    for names, expected, of in ((BY_REQUEST, batch, "one a request"), (BY_LAYER, np.full(group.rows, meta.model.layers), "one a layer")):
        for name in names:
            found = group.columns[name].lengths

            def message(row: int, expected: Any = expected, found: Any = found, of: str = of) -> str:
                return f"expected {expected[row]} entries ({of}), found {found[row]}"

            rows.update(report_rows(report, group.file, name, found != expected, message, group.first_row).tolist())
    return rows


def _check_order(group: Group, last_step: int, last_start: int, report: Report) -> set[int]:
    start, end, step = (group.columns[name].values for name in ("start_ns", "end_ns", "step"))
    before = np.concatenate([[last_start], start[:-1]])
    previous = np.concatenate([[last_step], step[:-1]])
    rows: set[int] = set()
    for field, bad, message in (
        ("end_ns", end < start, lambda i: f"expected a time >= start_ns (= {start[i]}), found {end[i]}"),
        ("start_ns", start < before, lambda i: f"expected a time >= that of the step before (= {before[i]}), found {start[i]}"),
        ("step", step <= previous, lambda i: f"expected a number > that of the step before (= {previous[i]}), found {step[i]}"),
    ):
        rows.update(report_rows(report, group.file, field, bad, message, group.first_row).tolist())
    return rows


def _check_known(group: Group, known: Collection[int], report: Report) -> set[int]:
    column = group.columns["requests"]
    unknown = ~np.isin(column.values, np.fromiter(known, np.int64, len(known)))

    def message(row: int) -> str:
        return f"expected requests of {REQUESTS}, found {sorted(set(column[row].tolist()) - set(known))}"

    return set(report_rows(report, group.file, "requests", column.any_row(unknown), message, group.first_row).tolist())
