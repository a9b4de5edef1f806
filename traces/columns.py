"""Reads the parquet files of a run, whole or in parts, and checks their shape: columns, types, no nulls, no negative numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traces.problems import Problem, Report, TraceError, refuse, report_rows


@dataclass(frozen=True)
class Column:
    """One column of a row group. ``offsets [N + 1]`` bound the entries of each row in ``values``; ``None`` for one value a row."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64] | None

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Entries of list row ``row``."""
        assert self.offsets is not None
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Entries of each list row ``[N]``."""
        assert self.offsets is not None
        return np.diff(self.offsets)

    def any_row(self, bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Rows ``[N]`` that hold an entry where ``bad`` (parallel to ``values``) is true."""
        if self.offsets is None:
            return bad
        rows = np.zeros(len(self.offsets) - 1, np.bool_)
        rows[np.searchsorted(self.offsets, np.flatnonzero(bad), side="right") - 1] = True
        return rows

    def tolist(self) -> list[Any]:
        """Python values by row; lists stay lists."""
        flat: list[Any] = self.values.tolist()
        if self.offsets is None:
            return flat
        bounds = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class Group:
    """A row group: ``file`` and ``first_row`` say where it lies."""

    file: str
    first_row: int
    rows: int
    columns: dict[str, Column]

    def place(self, row: int, field: str, message: str) -> Problem:
        """A finding in ``row`` of this group."""
        return Problem(self.file, self.first_row + row, field, message)


def open_parquet(directory: Path, file: str, schema: pa.Schema) -> pq.ParquetFile:
    """Open ``directory / file``. Raises :class:`TraceError` if it is missing, no parquet, or has other columns than ``schema``."""
    try:
        opened = pq.ParquetFile(directory / file)
    except FileNotFoundError:
        refuse(Problem(file, None, None, "missing; expected a parquet file"))
    except (pa.ArrowException, OSError) as error:
        refuse(Problem(file, None, None, f"not a whole parquet file ({_first_line(error)})"))
    found = opened.schema_arrow
    for name in found.names:
        if name not in schema.names:
            refuse(Problem(file, None, name, f"unknown column; expected {', '.join(schema.names)}"))
    for field in schema:
        at = found.get_all_field_indices(field.name)
        if len(at) != 1:
            refuse(Problem(file, None, field.name, f"expected one column of type {field.type}, found {len(at) or 'none'}"))
        if not _same_type(found.field(at[0]).type, field.type):
            refuse(Problem(file, None, field.name, f"expected type {field.type}, found {found.field(at[0]).type}"))
    return opened


def groups(directory: Path, files: list[str], schema: pa.Schema, names: list[str], report: Report) -> Iterator[Group]:
    """The row groups of ``files`` in order, with columns ``names``.

    A file that can't be read is reported and left; so is a column with nulls, with its group, because what it means is lost.
    """
    for file in files:
        try:
            opened = open_parquet(directory, file, schema)
            first_row = 0
            for index in range(opened.num_row_groups):
                table = _read_group(opened, index, names, file)
                columns = {name: _column(table.column(name), file, first_row, name) for name in names}
                yield Group(file, first_row, table.num_rows, columns)
                first_row += table.num_rows
        except TraceError as error:
            report(error.problem)


def check_not_negative(group: Group, report: Report) -> set[int]:
    """Report negative numbers in the integer columns of ``group``; returns the rows that hold one."""
    rows: set[int] = set()
    for name, column in group.columns.items():
        if column.values.dtype.kind == "i" and column.values.size and column.values.min() < 0:
            message = f"expected numbers >= 0, found {column.values.min()}"
            bad = column.any_row(column.values < 0)
            rows.update(report_rows(report, group.file, name, bad, lambda _, text=message: text, group.first_row).tolist())  # type: ignore[misc]
    return rows


def _read_group(opened: pq.ParquetFile, index: int, names: list[str], file: str) -> pa.Table:
    try:
        return opened.read_row_group(index, columns=names)
    except (pa.ArrowException, OSError) as error:
        refuse(Problem(file, None, None, f"row group {index} is damaged ({_first_line(error)})"))


def _column(chunked: pa.ChunkedArray, file: str, first_row: int, name: str) -> Column:
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # what pyarrow gives for no chunks in some versions
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        refuse(Problem(file, first_row + row, name, f"expected a value of type {array.type}, found null"))
    if not isinstance(array, pa.ListArray):
        return Column(array.to_numpy(zero_copy_only=False), None)
    column = Column(array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy().astype(np.int64))
    if array.values.null_count:
        row = int(np.argmax(column.any_row(array.values.is_null().to_numpy(zero_copy_only=False))))
        refuse(Problem(file, first_row + row, name, f"expected values of type {array.type.value_type}, found null"))
    return column


def _same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    # The name of a list's entries differs between writers and says nothing.
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return bool(found.value_type.equals(expected.value_type))
    return bool(found.equals(expected))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
