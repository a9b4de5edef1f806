"""Summary of a run: what ``sglang-ext trace info`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.layout import SELECTIONS
from traces.load import files_of
from traces.problems import refuse
from traces.reader import Run, iterate_selections
from traces.schema import DECODE


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
    """Sizes of the selections, and the share of a decode event's pages that the request's previous event had too."""
    known = {request.id for request in run.requests} if run.meta.complete else None
    started: set[int] = set()
    events = reused = followed = 0
    for event, delta in iterate_selections(run.path, run.meta, known, refuse):
        if event.kind == DECODE and event.request in started:
            pages = int((event.pages >= 0).sum())
            followed += pages
            reused += pages - len(delta.added)
        started.add(event.request)
        events += 1
    size = sum((run.path / file).stat().st_size for file in files_of(run.path, SELECTIONS, run.meta))
    return {"events": events, "bytes": size, "bytes_per_event": _share(size, events), "reused_from_previous": _share(reused, followed)}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percentiles(nanoseconds: Sequence[float]) -> dict[str, float] | None:
    if not nanoseconds:
        return None
    values = np.percentile(np.asarray(nanoseconds, np.float64), (50, 90, 99)) / 1e6
    return dict(zip(("p50", "p90", "p99"), values.tolist()))
