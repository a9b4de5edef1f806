"""Summary of a run: what ``sglang-ext trace info`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.columns import groups
from traces.layout import SELECTIONS
from traces.load import files_of
from traces.problems import refuse
from traces.reader import Run
from traces.schema import SELECTION_SCHEMA, WARM


def describe(run: Run) -> dict[str, Any]:
    """Counts, times and shares of ``run``, ready for JSON; a share or percentile of nothing is ``None``.

    Times are milliseconds, ``hit_rate`` = hits / (hits + misses) (a page that is born never crosses the link). Raises
    :class:`traces.problems.TraceError` if the selections are damaged.
    """
    requests, steps, meta = run.requests, run.steps, run.meta
    finished = [request for request in requests if request.status == "finished"]
    ends = [step.end_ns for step in steps] + [request.finish_ns for request in requests if request.finish_ns is not None]
    ttft = [r.first_token_ns - r.arrival_ns for r in requests if r.first_token_ns is not None]
    tpot = [
        (r.finish_ns - r.first_token_ns) / (r.output_tokens - 1)
        for r in finished
        if r.finish_ns is not None and r.first_token_ns is not None and r.output_tokens > 1
    ]
    layers = {name: _by_layer(run, name) for name in ("selected", "hits", "misses", "born", "demand_bytes", "prefix_bytes", "write_bytes")}
    touched = layers["hits"] + layers["misses"]
    return {
        "path": str(run.path),
        "complete": meta.complete,
        "model": meta.model.model_dump(),
        "algorithm": meta.sparse.algorithm,
        "budget": meta.sparse.budget,
        "page_size": meta.server.page_size,
        "duration_s": max(ends, default=0) / 1e9,
        "requests": {
            "total": len(requests),
            **{status: sum(r.status == status for r in requests) for status in ("finished", "aborted", "refused")},
            "retractions": sum(r.retractions for r in requests),
        },
        "tokens": {
            "prompt": sum(r.prompt_tokens for r in requests if r.scheduled_ns is not None),
            "cached": sum(r.cached_tokens for r in requests),
            "output": sum(r.output_tokens for r in requests),
        },
        "steps": {
            "total": len(steps),
            **{mode: sum(step.mode == mode for step in steps) for mode in ("prefill", "decode", "mixed")},
            "busy_s": sum(step.end_ns - step.start_ns for step in steps) / 1e9,
        },
        "ttft_ms": _percentiles(ttft),
        "tpot_ms": _percentiles(tpot),
        "pages": {name: int(layers[name].sum()) for name in ("selected", "hits", "misses", "born")},
        "hit_rate": _share(int(layers["hits"].sum()), int(touched.sum())),
        "hit_rate_by_layer": [_share(int(hits), int(all_)) for hits, all_ in zip(layers["hits"], touched)],
        "link_bytes": {name.removesuffix("_bytes"): int(layers[name].sum()) for name in ("demand_bytes", "prefix_bytes", "write_bytes")},
        "selections": _selections(run),
    }


def _by_layer(run: Run, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    total = np.zeros(run.meta.model.layers, np.int64)
    for step in run.steps:
        total += getattr(step, name)
    return total


def _selections(run: Run) -> dict[str, Any]:
    """Sizes of the selections; the deltas say what is reused, so nothing is decoded."""
    files = files_of(run.path, SELECTIONS, run.meta)
    attended: dict[int, int] = {}
    events = kept = followed = 0
    for group in groups(run.path, files, SELECTION_SCHEMA, ["request", "kind", "added", "removed"], refuse):
        columns = group.columns
        heads = (columns["request"].values.tolist(), columns["kind"].values.tolist())
        for request, kind, added, removed in zip(*heads, columns["added"].lengths.tolist(), columns["removed"].lengths.tolist()):
            before = None if kind == WARM else attended.get(request)
            attended[request] = (before or 0) + added - removed
            if before is not None:
                kept += before - removed
                followed += attended[request]
        events += group.rows
    size = sum((run.path / file).stat().st_size for file in files)
    return {"events": events, "bytes": size, "bytes_per_event": _share(size, events), "reused_from_previous": _share(kept, followed)}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percentiles(nanoseconds: Sequence[float]) -> dict[str, float] | None:
    if not nanoseconds:
        return None
    values = np.percentile(np.asarray(nanoseconds, np.float64), (50, 90, 99)) / 1e6
    return dict(zip(("p50", "p90", "p99"), values.tolist()))
