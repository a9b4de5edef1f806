"""Runs for the tests of the simulator, made in memory: a server with known costs, whose selections are random but seeded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from simulator.cost import STEP_PHASES, CostModel, KindCost
from simulator.engine import Engine, SimStep
from simulator.pagecache import BORN, HITS, MISSES, SELECTED, PageOutcomes, RequestCache, buffers_of, layer_budgets
from simulator.scheduler import ModelledSchedule
from simulator.work import FEATURES, WorkModel
from simulator.workload import Batch
from traces.schema import DECODE, WARM, ModelShape, PageSets, RequestRecord, RunMeta, ServerShape, SparseShape, StepRecord


class Event(NamedTuple):
    """A selection event."""

    step: int
    request: int
    context: int
    kind: int
    pages: PageSets


@dataclass
class MemoryRun:
    """A run that was never on disk."""

    meta: RunMeta
    requests: list[RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def selections(self) -> Iterator[Event]:
        return iter(self.events)


def make_meta(*, layers: int = 2, heads: int = 2, page: int = 4, budget: int | None = 16, factor: float = 1.5, **server: object) -> RunMeta:
    """A small configuration; ``server`` overrides fields of its part."""
    shape = {
        "page_size": page, "chunked_prefill_size": 16, "max_prefill_tokens": 64, "max_running_requests": 4, "home_tokens": 4096,
        "device_frames": 4000, "context_length": 512, "schedule_policy": "fcfs", "overlap": True, "mixed_chunk": False, "radix_cache": True,
    }  # fmt: skip
    return RunMeta(
        epoch_ns=0,
        seed=0,
        model=ModelShape(name="m", layers=layers, query_heads=heads, kv_heads=heads, head_dim=8, kv_dtype="bfloat16", kv_itemsize=2),
        server=ServerShape.model_validate({**shape, **server}),
        sparse=SparseShape(algorithm="quest", budget=budget, sink=4, window=4, dense_layers=(0,), buffer_factor=factor),
        hardware={"name": "none"},
        versions={},
        complete=True,
    )


def make_request(
    number: int, arrival: int, prompt: int, output: int, *, max_new: int | None = None, family: int | None = None
) -> RequestRecord:
    """A request that has yet to run; requests of one ``family`` share their prompt as far as it goes."""
    page = 4
    pages = (prompt + output) // page
    name = f"{number:08x}" if family is None else f"f{family:07x}"
    shared = prompt // page
    hashes = tuple(f"{name}{i:08x}" if i < shared else f"{number:08x}{i:08x}" for i in range(pages))
    return RequestRecord(
        id=number, arrival_ns=arrival, scheduled_ns=0, first_token_ns=None, finish_ns=None, prompt_tokens=prompt, output_tokens=output,
        max_new_tokens=output if max_new is None else max_new, cached_tokens=0, page_hashes=hashes, retractions=0, status="finished",
    )  # fmt: skip


def make_cost(
    *, gap: float = 20, wake: int = 7, handoff: int = 3, ratios: Sequence[float] = (1.0,), **by_phase: dict[str, float]
) -> CostModel:
    """Costs of both kinds of step from ``phase={feature: ns}``."""
    coefficients = np.zeros((len(STEP_PHASES), len(FEATURES)))
    for phase, units in by_phase.items():
        for name, value in units.items():
            coefficients[STEP_PHASES.index(phase), FEATURES.index(name)] = value
    everywhere = np.array([np.zeros(len(FEATURES)), np.full(len(FEATURES), np.inf)])
    kind = KindCost(coefficients, everywhere, np.asarray(ratios, np.float64))
    gaps = np.zeros((2, len(FEATURES)))
    gaps[:, FEATURES.index("step")] = gap
    return CostModel((kind, kind), gaps, wake, handoff)


REAL = make_cost(
    gap=30_000,
    wake=50_000,
    handoff=10_000,
    index={"step": 5_000, "prefill_tokens": 100},
    offload={"step": 4_000, "prefill_tokens": 200, "decode_rows": 200},
    select={"step": 10_000, "scored_pages": 150, "last_chunks": 9_000},
    retrieve={"step": 3_000, "selected_pages": 10, "missed_pages": 900, "prefix_pages": 400},
    attend={"step": 20_000, "selected_pages": 120, "prefill_area": 30},
    model={"step": 400_000, "decode_rows": 20_000, "prefill_tokens": 12_000},
    outside={"step": 60_000},
)
"""Costs of a made-up server."""


class Selector:
    """Seeded selections that keep most pages of the step before."""

    def __init__(self, meta: RunMeta, seed: int) -> None:
        self.meta = meta
        self.rng = np.random.default_rng(seed)
        self.budgets = layer_budgets(meta)
        self.scores: dict[int, np.ndarray] = {}

    def pages(self, request: int, context: int) -> PageSets:
        layers, heads = self.meta.model.layers, self.meta.model.kv_heads
        spans = [budget.span(context) for budget in self.budgets]
        noise = self.rng.random((layers, heads, 512))
        scores = 0.7 * self.scores.get(request, noise) + 0.3 * noise
        self.scores[request] = scores
        out = np.full((layers, heads, max(span.selected for span in spans)), -1, np.int32)
        for layer, span in enumerate(spans):
            for head in range(heads):
                order = np.argsort(-scores[layer, head, span.sink : span.window_first], kind="stable") + span.sink
                chosen = np.concatenate([np.arange(span.sink), order[: span.chosen], np.arange(span.window_first, span.pages)])
                out[layer, head, : span.selected] = np.sort(chosen)
        return out


class Server:
    """Serves ``requests`` with the rules of the scheduler model and records what it does. Costs are ``cost`` times a noise."""

    def __init__(self, meta: RunMeta, requests: Sequence[RequestRecord], cost: CostModel = REAL, seed: int | None = None) -> None:
        self.run = MemoryRun(meta, list(requests))
        self.selector = Selector(meta, 1)
        self.buffers = buffers_of(meta)
        self.limits = {r.id: r.prompt_tokens + r.max_new_tokens for r in requests}
        self.caches: dict[int, RequestCache] = {}
        self.work = WorkModel(meta)
        self.number = 0
        self.engine = Engine(requests, ModelledSchedule(meta), self._work_of, cost, meta.server.overlap, seed)

    def serve(self) -> MemoryRun:
        result = self.engine.run()
        self.run.steps = [self._record(number, step) for number, step in enumerate(result.steps)]
        times = {t.id: t for t in result.requests}
        self.run.requests = [
            r.model_copy(
                update={
                    "scheduled_ns": times[r.id].scheduled_ns, "first_token_ns": times[r.id].first_token_ns,
                    "finish_ns": times[r.id].finish_ns, "cached_tokens": times[r.id].cached_tokens,
                }
            )
            if r.id in times
            else r
            for r in self.run.requests
        ]  # fmt: skip
        return self.run

    def _work_of(self, batch: Batch):
        outcomes = PageOutcomes(self.run.meta.model.layers)
        for row in batch.rows:
            if not row.yields:
                continue
            if row.request not in self.caches:
                tokens = self.limits[row.request]
                self.caches[row.request] = RequestCache(self.buffers.plan(tokens), -(-(tokens + 1) // 4), 4)
            pages = self.selector.pages(row.request, row.context)
            cache = self.caches[row.request]
            self.run.events.append(Event(self.number, row.request, row.context, DECODE if row.decoding else WARM, pages))
            if row.decoding:
                outcomes.add(self.number, row.request, row.context, cache.access(pages, row.context))
            else:
                cache.warm(pages)
            cache.check_integrity()
        work = self.work.of_batch(batch._replace(recorded_step=self.number), outcomes, exact=True)
        self.number += 1
        return work

    def _record(self, number: int, step: SimStep) -> StepRecord:
        phases = list(step.cost.gpu)
        phases[STEP_PHASES.index("retrieve")] += step.cost.h2d
        phases[STEP_PHASES.index("offload")] += step.cost.d2h
        named = dict(zip(STEP_PHASES, phases, strict=True))
        outside = named.pop("outside")
        del named["model"]
        rows, counts = step.batch.rows, step.work.counts
        return StepRecord.model_validate(
            {
                "step": number, "mode": step.batch.mode, "start_ns": step.start_ns, "end_ns": step.end_ns,
                "forward_ns": step.end_ns - step.start_ns - outside,
                "requests": tuple(r.request for r in rows), "prefix_tokens": tuple(r.prefix for r in rows), "new_tokens": tuple(r.new for r in rows),
                "decoding": tuple(r.decoding for r in rows), "running": step.batch.running, "waiting": step.batch.waiting,
                **{f"{phase}_ns": ns for phase, ns in named.items()},
                **{name: tuple(map(int, counts[i])) for name, i in (("selected", SELECTED), ("hits", HITS), ("misses", MISSES), ("born", BORN))},
                **{f"{name}_bytes": tuple(map(int, getattr(step.work, name))) for name in ("demand", "prefix", "write")},
                "frames_used": step.batch.frames_used, "home_used": step.batch.home_used,
            }
        )  # fmt: skip


def make_requests(count: int, seed: int = 0, gap: int = 3_000_000, families: int = 3) -> list[RequestRecord]:
    """Requests of mixed lengths whose prompts fall into families."""
    rng = np.random.default_rng(seed)
    arrival, requests = 0, []
    for number in range(count):
        arrival += int(rng.exponential(gap))
        prompt, output = int(rng.integers(5, 90)), int(rng.integers(1, 30))
        requests.append(make_request(number, arrival, prompt, output, family=int(rng.integers(families))))
    return requests
