"""Hits and misses of every decode step, from the selections of a run through the serving side's own ``BucketedLRU``.

What a row hits depends only on its own request's events and on its slots, not on the schedule: so one pass over the selections
gives the outcome of every (request, context) under any schedule. Page sets are not kept, only four counts a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.policy import BucketedLRU, FixedBuffers, FlatPageTable, PageBudget, RowPlan
from simulator.workload import RecordedRun
from traces.schema import WARM, PageSets, RunMeta

Counts = npt.NDArray[np.int64]
"""``[4, layers]``: selected, hits, misses, born."""

SELECTED, HITS, MISSES, BORN = range(4)


def layer_budgets(meta: RunMeta) -> list[PageBudget]:
    """Page budget of each layer; dense layers and the dense algorithm have no limit."""
    sparse, page = meta.sparse, meta.server.page_size
    everything = PageBudget(page, None)
    limited = everything if sparse.algorithm == "dense" else PageBudget(page, sparse.budget, sparse.sink, sparse.window)
    return [everything if layer in sparse.dense_layers else limited for layer in range(meta.model.layers)]


def buffers_of(meta: RunMeta) -> FixedBuffers:
    """The buffer policy of a run."""
    return FixedBuffers(layer_budgets(meta), meta.model.kv_heads, meta.sparse.buffer_factor)


class RequestCache:
    """Frames of one request: all layers and KV heads.

    Rows are independent, so layers of equal capacity share one ``BucketedLRU`` (a dense layer has far more slots than a sparse one).
    """

    def __init__(self, plan: RowPlan, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.layers = len(plan.capacity)
        self.heads = plan.kv_heads
        self._groups: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, BucketedLRU]] = []
        for capacity in sorted(set(plan.capacity)):
            layers = np.flatnonzero(np.asarray(plan.capacity) == capacity)
            rows = np.arange(len(layers) * self.heads, dtype=np.int64)
            self._groups.append((layers, rows, capacity, BucketedLRU(len(rows), capacity, FlatPageTable(len(rows), pages))))
        self._open()

    def _open(self) -> None:
        for _, rows, capacity, lru in self._groups:
            lru.open(rows, capacity)

    def _rows(self, layers: npt.NDArray[np.int64], pages: PageSets) -> npt.NDArray[np.int32]:
        rows = pages[layers].reshape(len(layers) * self.heads, -1)
        width = int((rows >= 0).sum(axis=1).max(axis=None, initial=0))
        return rows[:, :width]

    def warm(self, pages: PageSets) -> None:
        """Start over with ``pages [L, H, S]`` in the frames, as after the last prefill chunk."""
        self._check(pages)
        self._open()
        for layers, rows, _, lru in self._groups:
            lru.warm(rows, self._rows(layers, pages))

    def access(self, pages: PageSets, context: int) -> Counts:
        """One decode step that attends ``pages [L, H, S]`` at ``context`` tokens, its newest included; returns counts by layer."""
        self._check(pages)
        newest = (context - 1) // self.page_size if (context - 1) % self.page_size == 0 else -1
        counts = np.zeros((4, self.layers), np.int64)
        for layers, rows, _, lru in self._groups:
            selected = self._rows(layers, pages)
            result = lru.access(rows, selected, np.full(len(rows), newest, np.int32))
            for line, flags in ((SELECTED, selected >= 0), (HITS, result.hit), (MISSES, result.miss), (BORN, result.born)):
                counts[line, layers] = flags.reshape(len(layers), -1).sum(axis=1)
        return counts

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if a table is broken."""
        for _, _, _, lru in self._groups:
            lru.check_integrity()

    def _check(self, pages: PageSets) -> None:
        if pages.shape[:2] != (self.layers, self.heads):
            raise ValueError(f"a selection has shape {pages.shape}, the model {self.layers} layers x {self.heads} KV heads")
        highest = int(pages.max(axis=None, initial=-1))
        if highest >= self.pages:
            raise ValueError(
                f"a selection has page {highest}, the request can have {self.pages} pages: prompt + max_new_tokens is too small"
            )


class PageOutcomes:
    """Counts of every recorded decode event, by (step, request) for an exact replay and by (request, context) for another schedule."""

    def __init__(self, layers: int) -> None:
        self._zero = np.zeros((4, layers), np.int64)
        self._by_step: dict[tuple[int, int], Counts] = {}
        self._by_context: dict[tuple[int, int], Counts] = {}
        self._last: dict[int, Counts] = {}

    def add(self, step: int, request: int, context: int, counts: Counts) -> None:
        """Record one event. A context that comes again (retraction) keeps its first outcome in the (request, context) view."""
        self._by_step[step, request] = counts
        self._by_context.setdefault((request, context), counts)
        self._last[request] = counts

    def of_step(self, step: int, request: int) -> Counts | None:
        """What the event of ``request`` in recorded step ``step`` did; ``None`` if none was recorded."""
        return self._by_step.get((step, request))

    def of_context(self, request: int, context: int) -> tuple[Counts, bool]:
        """Counts of ``request`` at ``context``, and whether they were recorded.

        A step that the recording does not have (another schedule may waste one step more at the end) takes the request's last outcome.
        """
        found = self._by_context.get((request, context))
        if found is not None:
            return found, True
        return self._last.get(request, self._zero), False

    def __len__(self) -> int:
        return len(self._by_step)

    def totals(self) -> Counts:
        """Sum over all events."""
        total = self._zero.copy()
        for counts in self._by_step.values():
            total += counts
        return total


def replay_pages(run: RecordedRun, meta: RunMeta | None = None, progress: Callable[[int], None] | None = None) -> PageOutcomes:
    """Replay every selection of ``run`` through request caches that are planned by ``meta`` (default: the run's own).

    Args:
        run: the recorded run.
        meta: another configuration to plan the rows with (a what-if).
        progress: called with the step of each event.

    Raises:
        ValueError: if a selection does not fit the run's model or its request.
    """
    meta = meta or run.meta
    buffers = buffers_of(meta)
    page = meta.server.page_size
    limits = {request.id: request.prompt_tokens + request.max_new_tokens for request in run.requests}
    last_step: dict[int, int] = {}
    for record in run.steps:
        for request in record.requests:
            last_step[request] = record.step
    outcomes = PageOutcomes(meta.model.layers)
    caches: dict[int, RequestCache] = {}
    for event in run.selections():
        if progress is not None:
            progress(event.step)
        cache = caches.get(event.request)
        if cache is None:
            if event.request not in limits:
                raise ValueError(f"selections of request {event.request} in step {event.step}, which requests.jsonl does not list")
            tokens = limits[event.request]
            pages = -(-(tokens + buffers.extra_tokens) // page)
            cache = caches[event.request] = RequestCache(buffers.plan(tokens), pages, page)
        if event.kind == WARM:
            cache.warm(event.pages)
        else:
            outcomes.add(event.step, event.request, event.context, cache.access(event.pages, event.context))
        if event.step >= last_step.get(event.request, event.step):
            del caches[event.request]
    return outcomes
