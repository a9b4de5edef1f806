"""Result files of a simulation, written so that a reader never sees half of one: to a temporary name first, then renamed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.cost import STEP_PHASES
from simulator.engine import SimResult
from simulator.whatif import Outcome


def write_files(directory: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write ``files`` by name into ``directory``, each as a whole; every one is complete before the first is renamed."""
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as temporary:
        for name, content in files.items():
            (Path(temporary) / name).write_bytes(content)
        for name in files:
            os.replace(Path(temporary) / name, directory / name)
            written.append(directory / name)
    return written


def to_json(value: Mapping[str, Any]) -> bytes:
    """Indented JSON, keys in the order given."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def to_gzip(content: bytes) -> bytes:
    """Compressed without a time stamp, so that equal runs give equal files."""
    return gzip.compress(content, compresslevel=6, mtime=0)


def requests_csv(result: SimResult) -> bytes:
    """One line a request, integer nanoseconds; empty where it never got there."""
    header = ("request", "arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prompt_tokens", "output_tokens", "cached_tokens")
    rows = (
        (r.id, r.arrival_ns, r.scheduled_ns, r.first_token_ns, r.finish_ns, r.prompt_tokens, r.output_tokens, r.cached_tokens)
        for r in result.requests
    )
    return _csv(header, rows)


def steps_csv(result: SimResult) -> bytes:
    """One line a step: what ran, its predicted phases, its pages and bytes."""
    header = (
        *("step", "mode", "start_ns", "end_ns", "rows", "running", "waiting", "prefill_tokens", "inside_fitted_range"),
        *(f"{phase}_ns" for phase in STEP_PHASES),
        *("h2d_ns", "d2h_ns", "selected", "hits", "misses", "born", "demand_bytes", "prefix_bytes", "write_bytes"),
    )
    rows = (
        (
            *(index, step.batch.mode, step.start_ns, step.end_ns, len(step.batch.rows), step.batch.running, step.batch.waiting),
            *(
                sum(row.new for row in step.batch.rows if not row.decoding),
                int(step.cost.inside),
                *step.cost.gpu,
                step.cost.h2d,
                step.cost.d2h,
            ),
            *(int(count) for count in step.work.counts.sum(axis=1)),
            *(int(step.work.demand.sum()), int(step.work.prefix.sum()), int(step.work.write.sum())),
        )
        for index, step in enumerate(result.steps)
    )
    return _csv(header, rows)


def links_csv(result: SimResult) -> bytes:
    """One line a transfer."""
    return _csv(("step", "direction", "class", "bytes", "submit_ns", "start_ns", "end_ns"), result.transfers)


def whatif_csv(outcomes: Sequence[Outcome]) -> bytes:
    """One line a scenario."""
    header = ("scenario", "hit_rate", "demand_bytes", "tpot_mean_ns", "ttft_mean_ns", "makespan_ns", "finished", "refused", "steps_outside")
    rows = (
        (
            *(o.scenario.label, f"{o.summary.pages.hit_rate:.6f}", o.summary.pages.demand_bytes, round(o.summary.tpot.mean)),
            *(round(o.summary.ttft.mean), o.summary.makespan_ns, o.summary.requests, o.result.refused, o.result.outside),
        )
        for o in outcomes
    )
    return _csv(header, rows)


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()
