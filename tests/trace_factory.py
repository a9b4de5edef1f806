"""Makes a valid run without a server: a seeded schedule whose hits come from the policies that serve.

One request prefills at a time, a chunk a step; while none does, all admitted requests decode. Selections keep most of the previous
step's pages (``turnover``) and draw the others by a popularity that falls with a power (``popularity``).
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_ext.policy import BucketedLRU, FixedBuffers, FlatPageTable, FrameLedger, PageBudget, PageSpan, RowPlan
from traces.schema import DECODE, WARM, ModelShape, PageSets, RequestRecord, RunMeta, ServerShape, SparseShape, StepRecord
from traces.writer import TraceWriter


@dataclass(frozen=True)
class StepCost:
    """Nanoseconds of a step: ``fixed + new * token + new * prefix * pair + bytes * byte``, times a noise around 1."""

    fixed: float = 200_000
    token: float = 5_000
    pair: float = 20
    byte: float = 0.02
    noise: float = 0.05


@dataclass(frozen=True)
class TraceSpec:
    """What :func:`make_run` makes; lengths are drawn from inclusive ranges of tokens."""

    requests: int = 6
    refused: int = 1
    layers: int = 3
    kv_heads: int = 2
    page_size: int = 4
    head_dim: int = 8
    kv_itemsize: int = 2
    budget: int | float | None = 24
    sink: int = 4
    window: int = 8
    dense_layers: tuple[int, ...] = (0,)
    buffer_factor: float = 1.5
    chunk: int = 32
    max_running: int = 3
    device_frames: int = 2_000
    prompt: tuple[int, int] = (20, 90)
    output: tuple[int, int] = (1, 24)
    documents: int = 2
    arrival_gap_ns: float = 2_000_000
    turnover: float = 0.2
    popularity: float = 1.0
    cost: StepCost = field(default_factory=StepCost)
    seed: int = 0

    @property
    def head_page_bytes(self) -> int:
        """Bytes of a page of one KV head."""
        return 2 * self.page_size * self.head_dim * self.kv_itemsize

    def budgets(self) -> list[PageBudget]:
        """The page budget of each layer."""
        sparse = PageBudget(self.page_size, self.budget, self.sink, self.window)
        return [PageBudget(self.page_size, None) if layer in self.dense_layers else sparse for layer in range(self.layers)]

    def meta(self) -> RunMeta:
        """Head of the run."""
        longest = self.prompt[1] + self.output[1]
        return RunMeta(
            epoch_ns=1_700_000_000_000_000_000,
            seed=self.seed,
            model=ModelShape(
                name="made-up", layers=self.layers, query_heads=2 * self.kv_heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
                kv_dtype="bfloat16", kv_itemsize=self.kv_itemsize,
            ),
            server=ServerShape(
                page_size=self.page_size, chunked_prefill_size=self.chunk, max_prefill_tokens=self.chunk, max_running_requests=self.max_running,
                home_tokens=(longest + self.page_size) * self.requests, device_frames=self.device_frames, context_length=longest + 1,
                schedule_policy="fcfs", overlap=False, mixed_chunk=False, radix_cache=True,
            ),
            sparse=SparseShape(
                algorithm="quest", budget=self.budget, sink=self.sink, window=self.window, dense_layers=self.dense_layers, buffer_factor=self.buffer_factor
            ),
            hardware={"name": "none"},
            versions={"sglang_ext": "test"},
        )  # fmt: skip


@dataclass
class _Request:
    id: int
    arrival: int
    prompt: int
    output: int
    hashes: tuple[str, ...]
    cached: int = 0
    prefix: int = 0
    emitted: int = 0
    scheduled: int | None = None
    first: int | None = None
    place: int = -1
    previous: PageSets | None = None


class _Selector:
    """Pages that a request's rows attend; seeded, with turnover and popularity."""

    def __init__(self, spec: TraceSpec, rng: np.random.Generator) -> None:
        self.spec, self.rng, self.budgets = spec, rng, spec.budgets()

    def pages(self, tokens: int, previous: PageSets | None) -> PageSets:
        spans = [budget.span(tokens) for budget in self.budgets]
        out = np.full((self.spec.layers, self.spec.kv_heads, max(span.selected for span in spans)), -1, np.int32)
        for layer, span in enumerate(spans):
            for head in range(self.spec.kv_heads):
                kept = np.empty(0, np.int32) if previous is None else previous[layer, head]
                out[layer, head, : span.selected] = self._row(span, kept)
        return out

    def _row(self, span: PageSpan, kept: np.ndarray) -> np.ndarray:
        candidates = np.arange(span.sink, span.window_first)
        weight = 1.0 / (1.0 + candidates) ** self.spec.popularity
        weight[np.isin(candidates, kept)] *= (1 - self.spec.turnover) / max(self.spec.turnover, 1e-3) * 10
        chosen = self.rng.choice(candidates, span.chosen, replace=False, p=weight / weight.sum()) if span.chosen else candidates[:0]
        return np.concatenate([np.arange(span.sink), np.sort(chosen), np.arange(span.window_first, span.pages)])


class _Maker:
    def __init__(self, directory: Path, spec: TraceSpec) -> None:
        self.spec, self.rng = spec, np.random.default_rng(spec.seed)
        self.selector = _Selector(spec, self.rng)
        self.ledger = FrameLedger(spec.device_frames, FixedBuffers(spec.budgets(), spec.kv_heads, spec.buffer_factor))
        most = self.ledger.buffers.plan(spec.prompt[1] + spec.output[1])
        self.rows = spec.layers * spec.kv_heads
        pages = -(-(spec.prompt[1] + spec.output[1] + 1) // spec.page_size)
        self.lru = BucketedLRU(spec.max_running * self.rows, max(most.capacity), FlatPageTable(spec.max_running * self.rows, pages))
        self.places = list(range(spec.max_running))
        self.radix: set[str] = set()
        self.writer = TraceWriter(directory, spec.meta())
        self.now = self.step_number = 0
        self.running: list[_Request] = []
        self.waiting: deque[_Request] = deque()
        self.prefilling: _Request | None = None
        names = ("selected", "hits", "misses", "born", "demand_bytes", "prefix_bytes", "write_bytes")
        self.sums = dict.fromkeys(names, 0)

    def make(self) -> None:
        arriving = deque(self._requests())
        refused = [int(x) for x in self.rng.integers(0, self.spec.requests, self.spec.refused)]
        for number, after in enumerate(sorted(refused)):
            self._record_refused(self.spec.requests + number, arriving[after].arrival)
        while arriving or self.waiting or self.running or self.prefilling:
            while arriving and arriving[0].arrival <= self.now:
                self.waiting.append(arriving.popleft())
            if self.prefilling is None and self.waiting and self.places:
                self._admit()
            if self.prefilling is not None:
                self._prefill(self.prefilling)
            elif self.running:
                self._decode()
            elif arriving:
                self.now = max(self.now, arriving[0].arrival)
            else:
                raise RuntimeError(f"request {self.waiting[0].id} can never be admitted: {self.ledger.total} frames")
        self.lru.check_integrity()
        self.ledger.check_integrity()
        self.writer.close(self.totals())

    def totals(self) -> dict[str, int]:
        names = {"selected": "pages_selected", "hits": "page_hits", "misses": "page_misses", "born": "pages_born"}
        links = {f"{kind}_bytes": f"link_bytes_{kind}" for kind in ("demand", "prefix", "write")}
        return {f"sparse_{name}": self.sums[field] for field, name in (names | links).items()}

    def _requests(self) -> list[_Request]:
        spec, made, arrival = self.spec, [], 0
        for number in range(spec.requests):
            prompt = int(self.rng.integers(spec.prompt[0], spec.prompt[1] + 1))
            output = int(self.rng.integers(spec.output[0], spec.output[1] + 1))
            document, shared = int(self.rng.integers(spec.documents)), int(self.rng.integers(prompt // spec.page_size + 1))
            # The last token is handed on without being run, so that its keys never exist.
            chain = [f"{document}" if page < shared else f"r{number}" for page in range((prompt + output - 1) // spec.page_size)]
            hashes = tuple(hashlib.sha256("/".join(chain[: page + 1]).encode()).hexdigest()[:16] for page in range(len(chain)))
            made.append(_Request(number, arrival, prompt, output, hashes))
            arrival += int(self.rng.exponential(spec.arrival_gap_ns))
        return made

    def _admit(self) -> None:
        request = self.waiting[0]
        plan = self.ledger.admit(request.id, request.prompt + request.output)
        if plan is None:
            return
        self.waiting.popleft()
        request.place = self.places.pop(0)
        most = (request.prompt - 1) // self.spec.page_size
        known = [digest in self.radix for digest in request.hashes[:most]] + [False]
        request.cached = request.prefix = known.index(False) * self.spec.page_size
        request.scheduled = self.now
        self._open(request, plan)
        self.prefilling = request

    def _row_ids(self, request: _Request) -> np.ndarray:
        return np.arange(request.place * self.rows, (request.place + 1) * self.rows)

    def _open(self, request: _Request, plan: RowPlan) -> None:
        by_layer = self._row_ids(request).reshape(self.spec.layers, self.spec.kv_heads)
        for layer, capacity in enumerate(plan.capacity):
            self.lru.open(by_layer[layer], capacity)

    def _prefill(self, request: _Request) -> None:
        spec = self.spec
        new = min(spec.chunk, request.prompt - request.prefix)
        prefix_pages = -(-request.prefix // spec.page_size)
        prefix_bytes = (prefix_pages * spec.kv_heads * spec.head_page_bytes,) * spec.layers
        last = request.prefix + new == request.prompt
        if last:
            request.previous = self.selector.pages(request.prompt, None)
            self.lru.warm(self._row_ids(request), request.previous.reshape(self.rows, -1))
            self.writer.selection(self.step_number, request.id, request.prompt, WARM, request.previous)
        nothing = (0,) * spec.layers
        self._step("prefill", [request], [new], dict.fromkeys(("selected", "hits", "misses", "born"), nothing), prefix_bytes)
        request.prefix += new
        if last:
            self.radix.update(request.hashes[: request.prompt // spec.page_size])
            self.prefilling = None
            request.emitted, request.first = 1, self.now
            self.running.append(request)
            self._finish_done()

    def _decode(self) -> None:
        spec, batch = self.spec, list(self.running)
        sums = {name: np.zeros(spec.layers, np.int64) for name in ("selected", "hits", "misses", "born")}
        for request in batch:
            context = request.prefix + 1
            request.previous = self.selector.pages(context, request.previous)
            newest = (context - 1) // spec.page_size if (context - 1) % spec.page_size == 0 else -1
            access = self.lru.access(
                self._row_ids(request), request.previous.reshape(self.rows, -1), np.full(self.rows, newest, np.int32)
            )
            for name, mask in (("hits", access.hit), ("misses", access.miss), ("born", access.born), ("selected", access.slots >= 0)):
                sums[name] += mask.reshape(spec.layers, -1).sum(axis=1)
            self.writer.selection(self.step_number, request.id, context, DECODE, request.previous)
        self._step("decode", batch, [1] * len(batch), {name: tuple(value.tolist()) for name, value in sums.items()}, (0,) * spec.layers)
        for request in batch:
            request.prefix += 1
            request.emitted += 1
        self._finish_done()

    def _step(self, mode: str, batch: list[_Request], new: list[int], counts: dict[str, tuple[int, ...]], prefix_bytes: tuple[int, ...]) -> None:
        spec, cost = self.spec, self.spec.cost
        token_bytes = spec.kv_heads * 2 * spec.head_dim * spec.kv_itemsize
        links = {
            "demand_bytes": tuple(count * spec.head_page_bytes for count in counts["misses"]),
            "prefix_bytes": prefix_bytes,
            "write_bytes": (sum(new) * token_bytes,) * spec.layers,
        }
        pairs = sum(n * request.prefix for n, request in zip(new, batch))
        took = cost.fixed + sum(new) * cost.token + pairs * cost.pair + sum(sum(value) for value in links.values()) * cost.byte
        forward = int(took * max(0.1, 1 + cost.noise * self.rng.standard_normal()))
        phases = dict.fromkeys(("index_ns", "offload_ns", "select_ns", "retrieve_ns", "attend_ns"), forward // 10)
        start, self.now = self.now + 10_000, self.now + 20_000 + forward
        self.writer.step(
            StepRecord.model_validate(dict(
                step=self.step_number, mode=mode, start_ns=start, end_ns=self.now, forward_ns=forward,
                requests=tuple(request.id for request in batch), prefix_tokens=tuple(request.prefix for request in batch), new_tokens=tuple(new),
                decoding=(mode == "decode",) * len(batch), running=len(self.running), waiting=len(self.waiting),
                frames_used=self.ledger.used, home_used=sum(request.prefix for request in batch), **phases, **counts, **links,
            ))
        )  # fmt: skip
        for name, value in (counts | links).items():
            self.sums[name] += sum(value)
        self.step_number += 1

    def _finish_done(self) -> None:
        for request in [request for request in self.running if request.emitted == request.output]:
            self.running.remove(request)
            self.places.append(request.place)
            self.ledger.release(request.id)
            self.lru.close(self._row_ids(request))
            self.writer.request(
                RequestRecord(
                    id=request.id, arrival_ns=request.arrival, scheduled_ns=request.scheduled, first_token_ns=request.first, finish_ns=self.now,
                    prompt_tokens=request.prompt, output_tokens=request.output, max_new_tokens=request.output, cached_tokens=request.cached,
                    page_hashes=request.hashes, retractions=0, status="finished",
                )
            )  # fmt: skip

    def _record_refused(self, number: int, arrival: int) -> None:
        self.writer.request(
            RequestRecord(
                id=number, arrival_ns=arrival, scheduled_ns=None, first_token_ns=None, finish_ns=None, prompt_tokens=10**6, output_tokens=0,
                max_new_tokens=1, cached_tokens=0, page_hashes=(), retractions=0, status="refused",
            )
        )  # fmt: skip


def make_run(directory: Path, spec: TraceSpec | None = None) -> Path:
    """Write a valid run into ``directory`` and return it. Raises ``ValueError`` if it holds one already."""
    _Maker(directory, spec or TraceSpec()).make()
    return directory
