"""Names of the files of a run directory."""

from __future__ import annotations

from pathlib import Path

META = "meta.json"
REQUESTS = "requests.jsonl"
STEPS = "steps.parquet"
SELECTIONS = "selections.parquet"


def parts_of(directory: Path, name: str) -> Path:
    """Folder of the numbered parts of the parquet file ``name``, while the run in ``directory`` is unfinished."""
    return directory / f"{name.removesuffix('.parquet')}.parts"
