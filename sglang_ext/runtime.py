"""What one scheduler process knows about its sparse run: tiers, ledger, live requests, the step in progress, counters.

SGLang builds it with the attention backend, in the scheduler process; the hooks of ``scheduling.py`` drive it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.algorithms import create_algorithm
from sglang_ext.algorithms.dense import Dense
from sglang_ext.config import SparseConfig
from sglang_ext.memory.frames import DeviceTier, FramePool
from sglang_ext.policy import FixedBuffers, FrameLedger, PageBudget
from sglang_ext.policy.admission import AdmissionError

if TYPE_CHECKING:
    from sglang_ext.algorithms.base import SparseAlgorithm
    from sglang_ext.memory.pool import TwoTierPool
    from sglang_ext.recorder import Recorder

logger = logging.getLogger(__name__)

PHASES = ("index", "offload", "select", "retrieve", "attend")


@dataclass
class LiveRequest:
    """A request between its arrival and its end. Times are ``time.time_ns()``."""

    number: int
    rid: str
    prompt_tokens: int
    max_new_tokens: int
    arrival_ns: int
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    cached_tokens: int | None = None
    retractions: int = 0
    slot: int | None = None
    decoding: bool = False
    refused: bool = False

    @property
    def max_tokens(self) -> int:
        """Most tokens the request can ever hold."""
        return self.prompt_tokens + self.max_new_tokens


class StepEntry(NamedTuple):
    """One request of the step in progress, in batch order."""

    live: LiveRequest
    slot: int
    decoding: bool
    last_chunk: bool


@dataclass
class StepStats:
    """What the layers of one step did. Lists have one entry a layer."""

    layers: int
    start_ns: int = field(default_factory=time.time_ns)
    forward_ns: int = 0
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    selected: list[int] = field(init=False)
    hits: list[int] = field(init=False)
    misses: list[int] = field(init=False)
    born: list[int] = field(init=False)
    prefix_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    decode_pages: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """``[B_decoding, H, S]`` a layer, in batch order of the decoding requests."""
    warm_pages: dict[int, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    """``[H, S]`` a layer, by place in the batch of a request whose last chunk this is."""

    def __post_init__(self) -> None:
        self.selected = [0] * self.layers
        self.hits = [0] * self.layers
        self.misses = [0] * self.layers
        self.born = [0] * self.layers


class SparseRuntime:
    """One a scheduler process.

    Args:
        config: the run's configuration.
        pool: the two-tier pool SGLang allocated (home is in it).
        allocator: SGLang's allocator of its logical slots.
        query_heads: query heads of this rank.
        requests: request slots (``req_to_token`` rows).
        context_length: most tokens of a request.
        kept: a runtime over the same home whose summaries and indexer go on (studies); ``None`` starts with empty summaries.

    Raises:
        ValueError: if the configuration can't serve even the smallest request, with the arithmetic.
    """

    def __init__(
        self, config: SparseConfig, pool: TwoTierPool, allocator: Any, *, query_heads: int, requests: int, context_length: int, kept: SparseRuntime | None = None
    ) -> None:
        self.config = config
        self.pool = pool
        self.allocator = allocator
        self.home = pool.home
        self.layers: int = pool.layer_num
        self.kv_heads: int = pool.head_num
        self.query_heads = query_heads
        self.page_size: int = pool.page_size
        self.context_length = context_length
        if query_heads % self.kv_heads:
            raise ValueError(f"query heads({query_heads}) must be a multiple of KV heads({self.kv_heads}) for grouped-query attention")
        if config.dense_layers and config.dense_layers[-1] >= self.layers:
            raise ValueError(f"--sparse-dense-layers {list(config.dense_layers)}: this model has layers 0..{self.layers - 1}")
        algorithm = create_algorithm(config.algorithm)
        dense = Dense()
        limited = PageBudget(self.page_size, config.budget, config.sink, config.window)
        unlimited = PageBudget(self.page_size, None, config.sink, config.window)
        self.algorithms = [dense if layer in config.dense_layers else algorithm for layer in range(self.layers)]
        self.budgets = [unlimited if layer in config.dense_layers else limited for layer in range(self.layers)]
        self.buffers = FixedBuffers(self.budgets, self.kv_heads, config.buffer_factor)

        if kept is not None and algorithm.summary_shape(pool.head_dim) not in (None, kept.indexer.summary_shape(pool.head_dim)):
            raise ValueError(f"algorithm {config.algorithm} keeps other summaries than the pages at home have")
        # Who keeps the summaries: the algorithm, or (studies) one before it, so that a later one finds every page indexed.
        self.indexer: SparseAlgorithm = algorithm if kept is None else kept.indexer
        shape = self.indexer.summary_shape(pool.head_dim)
        self.summaries: list[torch.Tensor | None] = kept.summaries if kept is not None else [
            None
            if shape is None or layer in config.dense_layers
            else torch.zeros((pool.pages, self.kv_heads, *shape), dtype=pool.store_dtype, device=pool.device)
            for layer in range(self.layers)
        ]
        self.frame_bytes = self.home.head_page_bytes
        frames = self._frames_that_fit()
        self.ledger = FrameLedger(frames, self.buffers)
        try:
            self.ledger.check_possible(1)
        except AdmissionError as error:
            raise ValueError(f"--sparse-device-memory {config.device_memory} holds {frames} frames, too few for any request: {error}") from None
        self._check_available(frames * self.frame_bytes)
        plan = self.buffers.plan(context_length)
        self.device = DeviceTier(
            FramePool(frames, self.page_size, pool.head_dim, pool.store_dtype, pool.device),
            requests,
            self.kv_heads,
            plan.capacity,
            self.buffers.budgets[0].pages_of(context_length + self.buffers.extra_tokens) + 1,
        )
        self.retractions = 0
        self.live: dict[str, LiveRequest] = {}
        self.ending: list[tuple[LiveRequest, Any]] = []  # ended requests whose record is due
        self.idle_work = False  # something ran since the last idle check
        self.entries: list[StepEntry] = []
        self.stats: StepStats | None = None
        self.recorder: Recorder | None = None
        self.totals = dict.fromkeys(
            ("sparse_pages_selected", "sparse_page_hits", "sparse_page_misses", "sparse_pages_born", "sparse_refused_requests"), 0
        )
        self._next_number = 0

    def _frames_that_fit(self) -> int:
        size = self.config.device_memory
        if size.tokens is not None:
            return -(-size.tokens // self.page_size) * self.kv_heads * self.layers
        summaries = sum(int(one.nbytes) for one in self.summaries if one is not None)
        # Layer-streamed prefill: this layer's prefix and the next one's.
        workspace = 2 * min(self.config.workspace_tokens, self.context_length) * self.home.token_bytes
        left = (size.nbytes or 0) - summaries - workspace
        if left < self.frame_bytes:
            raise ValueError(
                f"--sparse-device-memory {size} leaves no room for frames: summaries of {self.pool.pages} home pages take {summaries / 2**20:.1f} MiB, "
                f"the prefill workspace {workspace / 2**20:.1f} MiB. Raise it, or lower --sparse-host-memory or workspace_tokens"
            )
        return left // self.frame_bytes

    def _check_available(self, wanted: int) -> None:
        if self.pool.device == "cpu":
            import psutil

            free = int(psutil.virtual_memory().available)
        else:
            free = torch.cuda.mem_get_info()[0]
        if wanted > free:
            raise ValueError(
                f"--sparse-device-memory {self.config.device_memory} asks for {wanted / 2**30:.2f} GiB of frames, {free / 2**30:.2f} GiB are available: lower it"
            )

    # -- requests ---------------------------------------------------------------------------------------------------------------

    def arrive(self, rid: str, prompt_tokens: int, max_new_tokens: int) -> LiveRequest:
        """A request reached the scheduler."""
        live = LiveRequest(self._next_number, rid, prompt_tokens, max_new_tokens, time.time_ns())
        self._next_number += 1
        self.live[rid] = live
        return live

    def bind(self, live: LiveRequest, slot: int) -> None:
        """Give the rows of ``live`` their frames, before its last prefill chunk runs."""
        plan = self.ledger.admit(live.rid, live.max_tokens)
        if plan is None:
            raise RuntimeError(f"request {live.number} runs without a reservation of frames")
        self.device.open(slot, plan)
        live.slot = slot

    def unbind(self, live: LiveRequest) -> None:
        """Take the frames of ``live`` back (it ended or was retracted)."""
        if live.slot is not None:
            self.device.close(live.slot)
            live.slot = None
        live.decoding = False
        self.ledger.release(live.rid)

    # -- steps ------------------------------------------------------------------------------------------------------------------

    def begin_step(self, entries: list[StepEntry]) -> None:
        """Requests of the batch about to run, in batch order."""
        self.entries = entries
        self.idle_work = True
        self.stats = StepStats(self.layers)
        for entry in entries:
            if entry.last_chunk and not entry.decoding:
                self.bind(entry.live, entry.slot)

    def end_step(self) -> StepStats:
        """The step's forward is done: what it did."""
        stats = self.stats
        assert stats is not None
        for entry in self.entries:
            if entry.last_chunk:
                entry.live.decoding = True
        self.totals["sparse_pages_selected"] += sum(stats.selected)
        self.totals["sparse_page_hits"] += sum(stats.hits)
        self.totals["sparse_page_misses"] += sum(stats.misses)
        self.totals["sparse_pages_born"] += sum(stats.born)
        self.stats = None
        self.entries = []
        return stats

    def counters(self) -> dict[str, int]:
        """Totals by the names of the metrics, without their prefix ``sglang:``."""
        waits = {"sparse_admission_waits": self.ledger.refusals}
        link = {f"sparse_link_bytes_{name}": total for name, total in self.home.link.total.items()}
        return {**self.totals, **waits, **link}

    def release_device(self) -> None:
        """Drop the device tier (another runtime takes its place). Raises ``RuntimeError`` while requests live."""
        if self.live:
            raise RuntimeError(f"{len(self.live)} requests are live")
        del self.device

    def home_tokens_used(self) -> int:
        """Token slots of home in use by requests or cached in the radix tree."""
        return int(self.pool.size - self.allocator.available_size())

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless tiers and ledger agree with each other."""
        self.ledger.check_integrity()
        self.device.check_integrity()
        owners = {live.slot: live for live in self.live.values() if live.slot is not None}
        frames = sum(self.ledger.reserved[live.rid].frames for live in owners.values())
        if frames != self.device.used:
            raise RuntimeError(f"frames: {self.device.used} owned by rows, {frames} reserved by the requests that are bound")


_current: SparseRuntime | None = None


def set_runtime(runtime: SparseRuntime | None) -> None:
    """Install the runtime of this process."""
    global _current
    _current = runtime


def get_runtime() -> SparseRuntime | None:
    """The runtime of this process, ``None`` when the run is not sparse."""
    return _current
