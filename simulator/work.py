"""What a batch asks of the GPU and of the link: counts and bytes by layer, and the features that its cost is a function of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.pagecache import MISSES, SELECTED, Counts, PageOutcomes, layer_budgets
from simulator.workload import Batch, Row
from traces.schema import RunMeta, StepRecord

FEATURES = (
    "step",
    "decode_rows",
    "selected_pages",
    "scored_pages",
    "missed_pages",
    "prefill_tokens",
    "prefill_area",
    "prefix_pages",
    "last_chunks",
)
"""What a step's cost may depend on: 1; decoding requests; head pages attended, scored by the selector, missed (all layers); prompt
tokens; (query, key) pairs of prefill; head pages of prefixes that cross the link; prefills that end in this step."""

Vector = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int64]


class StepWork(NamedTuple):
    """``counts [4, L]`` (selected, hits, misses, born), bytes of each class by layer ``[L]``, and the features ``[len(FEATURES)]``.

    ``unrecorded``: decode rows whose selection the recording does not have.
    """

    counts: Counts
    demand: Bytes
    prefix: Bytes
    write: Bytes
    features: Vector
    unrecorded: int = 0

    @property
    def h2d_bytes(self) -> int:
        """Bytes from home to the device, all layers."""
        return int(self.demand.sum() + self.prefix.sum())

    @property
    def d2h_bytes(self) -> int:
        """Bytes from the device to home, all layers."""
        return int(self.write.sum())


class WorkModel:
    """Turns batches into :class:`StepWork` for one configuration."""

    def __init__(self, meta: RunMeta) -> None:
        self.meta = meta
        self.layers = meta.model.layers
        self.heads = meta.model.kv_heads
        self.page = meta.server.page_size
        self.token_bytes = 2 * meta.model.head_dim * meta.model.kv_itemsize * self.heads
        self._limited = [budget for budget in layer_budgets(meta) if budget.budget is not None]
        self._scored: dict[int, int] = {}

    def of_batch(self, batch: Batch, outcomes: PageOutcomes, exact: bool) -> StepWork:
        """Work of ``batch``; ``exact`` takes the events of its recorded step, else those of (request, context)."""
        counts = np.zeros((4, self.layers), np.int64)
        unrecorded = 0
        for row in batch.rows:
            if not row.decoding:
                continue
            if exact:
                found = outcomes.of_step(batch.recorded_step, row.request)
                known = found is not None
                counts += 0 if found is None else found
            else:
                event, known = outcomes.of_context(row.request, row.context)
                counts += event
            unrecorded += not known
        return self._finish(batch, counts, unrecorded)

    def of_record(self, batch: Batch, record: StepRecord) -> StepWork:
        """Work of a measured step, by the counts that were measured."""
        counts = np.array([record.selected, record.hits, record.misses, record.born], np.int64).reshape(4, self.layers)
        return self._finish(batch, counts, 0)

    def _finish(self, batch: Batch, counts: Counts, unrecorded: int) -> StepWork:
        decode = [row for row in batch.rows if row.decoding]
        prefill = [row for row in batch.rows if not row.decoding]
        prefix_pages = sum(-(-row.prefix // self.page) for row in prefill)
        tokens = sum(row.new for row in batch.rows)
        prefix = np.full(self.layers, prefix_pages * self.heads * self.meta.head_page_bytes, np.int64)
        write = np.full(self.layers, tokens * self.token_bytes, np.int64)
        features = np.array(
            [
                1,
                len(decode),
                counts[SELECTED].sum(),
                sum(self._scored_pages(row.context) for row in decode),
                counts[MISSES].sum(),
                sum(row.new for row in prefill),
                sum(_area(row) for row in prefill),
                prefix_pages * self.heads * self.layers,
                sum(row.yields for row in prefill),
            ],
            np.float64,
        )
        return StepWork(counts, counts[MISSES] * self.meta.head_page_bytes, prefix, write, features, unrecorded)

    def _scored_pages(self, context: int) -> int:
        known = self._scored.get(context)
        if known is None:
            spans = [budget.span(context) for budget in self._limited]
            known = self.heads * sum(span.window_first - span.sink for span in spans if not span.covers)
            self._scored[context] = known
        return known


def _area(row: Row) -> int:
    return row.new * row.prefix + row.new * (row.new + 1) // 2
