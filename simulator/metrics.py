"""One set of metrics for measured and simulated runs, so that a comparison compares like with like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulator.engine import RequestTimes, SimResult
from simulator.workload import RecordedRun

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles in nanoseconds over ``count`` requests; zeros when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class PageTotals:
    """Pages and link bytes of a run. ``by_layer`` hold one entry a layer."""

    selected: int
    hits: int
    misses: int
    born: int
    demand_bytes: int
    prefix_bytes: int
    write_bytes: int
    hits_by_layer: tuple[int, ...]
    misses_by_layer: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Hits of hits and misses; 1 when nothing was selected (born pages cost nothing and count on neither side)."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


@dataclass(frozen=True)
class Summary:
    """A run in numbers; times in nanoseconds. ``ttft``: arrival to first token; ``tpot``: (finish - first token) / (tokens - 1);
    ``e2e``: arrival to finish; ``makespan``: first arrival to last finish."""

    requests: int
    steps: int
    ttft: Spread
    tpot: Spread
    e2e: Spread
    makespan_ns: int
    output_tokens: int
    pages: PageTotals

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of the makespan."""
        return self.output_tokens * 1e9 / self.makespan_ns if self.makespan_ns else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "hit_rate": self.pages.hit_rate, "tokens_per_second": self.tokens_per_second}


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of ``values``."""
    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0)
    array = np.asarray(values, np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(array, QUANTILES))
    return Spread(len(values), float(array.mean()), p50, p90, p99)


def ttfts(requests: Iterable[RequestTimes]) -> list[float]:
    """Time to the first token of each request that has one."""
    return [float(r.first_token_ns - r.arrival_ns) for r in requests if r.first_token_ns is not None]


def tpots(requests: Iterable[RequestTimes]) -> list[float]:
    """Time per output token after the first, of each finished request with at least two."""
    return [
        (r.finish_ns - r.first_token_ns) / (r.output_tokens - 1)
        for r in requests
        if r.finish_ns is not None and r.first_token_ns is not None and r.output_tokens > 1
    ]


def measured_times(run: RecordedRun) -> list[RequestTimes]:
    """Request times as they were measured."""
    return [
        RequestTimes(
            r.id, r.arrival_ns, r.prompt_tokens, r.output_tokens, r.status, r.scheduled_ns, r.first_token_ns, r.finish_ns, r.cached_tokens
        )
        for r in run.requests
    ]


def summarize(requests: Sequence[RequestTimes], steps: int, pages: PageTotals) -> Summary:
    """Summary of the requests that finished, here and in the recording (one that was aborted or refused there has no latency)."""
    done = [r for r in requests if r.finish_ns is not None and r.status == "finished"]
    ends = [r.finish_ns for r in done if r.finish_ns is not None]
    makespan = max(ends) - min(r.arrival_ns for r in done) if ends else 0
    e2e = [float(end - r.arrival_ns) for r, end in zip(done, ends, strict=True)]
    output = sum(r.output_tokens for r in done)
    return Summary(len(done), steps, spread(ttfts(done)), spread(tpots(done)), spread(e2e), makespan, output, pages)


def measured_summary(run: RecordedRun) -> Summary:
    """Summary of what was measured."""
    columns = {
        name: np.array([getattr(s, name) for s in run.steps], np.int64).sum(axis=0) for name in ("selected", "hits", "misses", "born")
    }
    nbytes = {name: sum(sum(getattr(s, f"{name}_bytes")) for s in run.steps) for name in ("demand", "prefix", "write")}
    return summarize(measured_times(run), len(run.steps), _totals(columns, nbytes))


def simulated_summary(result: SimResult) -> Summary:
    """Summary of a simulation."""
    layers = result.steps[0].work.counts.shape[1] if result.steps else 0
    counts = sum((step.work.counts for step in result.steps), np.zeros((4, layers), np.int64))
    columns = dict(zip(("selected", "hits", "misses", "born"), counts, strict=True))
    nbytes = {name: sum(int(getattr(step.work, name).sum()) for step in result.steps) for name in ("demand", "prefix", "write")}
    return summarize(result.requests, len(result.steps), _totals(columns, nbytes))


def _totals(columns: dict[str, Any], nbytes: dict[str, int]) -> PageTotals:
    hits, misses = (tuple(int(value) for value in columns[name]) for name in ("hits", "misses"))
    return PageTotals(
        selected=int(columns["selected"].sum()),
        hits=sum(hits),
        misses=sum(misses),
        born=int(columns["born"].sum()),
        demand_bytes=nbytes["demand"],
        prefix_bytes=nbytes["prefix"],
        write_bytes=nbytes["write"],
        hits_by_layer=hits,
        misses_by_layer=misses,
    )
