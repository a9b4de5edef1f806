"""The attention backend ``sparse``: prefill and decode as the five operations (DESIGN section 3).

    prefill   offload chunk -> index -> attend: chunk (causal), then the prefix streamed from home in pieces, merged by LSE
    decode    offload token -> index -> select -> retrieve (hits keep, misses are gathered from home) -> attend over the frames

A batch may mix both (mixed chunked prefill): each request takes its own path. Prefill is exact dense.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sparse_ops import append_token, attend_dense, attend_frames, gather_pages, gather_prefix, merge_partials, store_tokens

from sglang_ext.algorithms.base import PageIds, RowsView
from sglang_ext.memory.frames import DUMMY, LayerRows
from sglang_ext.policy import PageBudget, PageSpan
from sglang_ext.runtime import SparseRuntime, StepStats

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

clock = time.perf_counter_ns


@dataclass(frozen=True)
class PrefillPlan:
    """One request's chunk: batch tokens ``[start, end)``, ``prefix`` tokens before it, home pages of all of it in order."""

    place: int
    start: int
    end: int
    prefix: int
    pages: torch.Tensor
    slot: int
    warm: bool


@dataclass(frozen=True)
class SpanPlan:
    """What the decoding requests attend under one budget: ``counts [B]`` pages, ``valid [B]`` tokens of those pages that are live."""

    spans: list[PageSpan]
    counts: npt.NDArray[np.int64]
    valid: torch.Tensor


@dataclass(frozen=True)
class DecodePlan:
    """The decoding requests of a batch.

    ``where [B]``: token of the batch. ``tokens [B]``: context, newest included. ``table [B, N]``: home pages. ``slots [B]``: request
    slots. ``page``, ``offset [B]``: home page and place of the newest token. ``born [B]``: page that begins now, or -1. ``spans``: what is
    attended, one entry a distinct budget.
    """

    where: torch.Tensor
    tokens: torch.Tensor
    table: torch.Tensor
    slots: npt.NDArray[np.int64]
    page: torch.Tensor
    offset: torch.Tensor
    born: npt.NDArray[np.int32]
    spans: dict[PageBudget, SpanPlan]


def check_layer(layer: RadixAttention, save_kv_cache: bool, extra: dict[str, Any]) -> None:
    """Raise ``ValueError`` for what a model's layer asks and this backend does not do: a wrong answer would look healthy."""
    wants = [name for name, value in extra.items() if value is not None]
    if layer.logit_cap:
        wants.append(f"logit cap {layer.logit_cap:g}")
    if layer.sliding_window_size not in (None, -1):
        wants.append(f"sliding window {layer.sliding_window_size}")
    if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
        wants.append(f"attention type {layer.attn_type.value}")
    if not save_kv_cache:
        wants.append("save_kv_cache=False")
    if wants:
        raise ValueError(f"layer {layer.layer_id} asks for {', '.join(wants)}, which sparse attention does not support yet: leave out the --sparse-* flags")


class SparseAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Plan once a step (``init_forward_metadata``), run a layer at a time."""

    def __init__(self, runner: ModelRunner, runtime: SparseRuntime) -> None:
        super().__init__()
        self.runtime = runtime
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.first_layer: int = runtime.pool.start_layer or 0
        self.prefills: list[PrefillPlan] = []
        self.decode: DecodePlan | None = None
        self._checked: set[int] = set()

    # -- plan -------------------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Split the batch into chunks to prefill and tokens to decode; look up home pages once for all layers."""
        runtime = self.runtime
        stats = runtime.stats
        assert stats is not None, "a forward outside the scheduler's run_batch"
        lengths = forward_batch.seq_lens_cpu.tolist()
        extends = forward_batch.forward_mode.is_extend()
        news = list(forward_batch.extend_seq_lens_cpu) if extends else [1] * len(lengths)
        prefixes = [length - new for length, new in zip(lengths, news, strict=True)]
        stats.prefix_tokens, stats.new_tokens = prefixes, [int(new) for new in news]
        table = self.req_to_token_pool.req_to_token
        size = runtime.page_size
        self.prefills = []
        decoding: list[tuple[int, int, int]] = []  # (batch token, slot, context)
        start = 0
        for place, (entry, new) in enumerate(zip(runtime.entries, news, strict=True)):
            if entry.decoding:
                decoding.append((start, entry.slot, lengths[place]))
            else:
                pages = (table[entry.slot, : lengths[place] : size] // size).to(torch.int64)
                self.prefills.append(
                    PrefillPlan(place, start, start + int(new), prefixes[place], pages, entry.slot, entry.last_chunk)
                )
            start += int(new)
        self.decode = self._plan_decode(decoding, table) if decoding else None

    def _plan_decode(self, decoding: list[tuple[int, int, int]], table: torch.Tensor) -> DecodePlan:
        size = self.runtime.page_size
        slots = np.array([slot for _, slot, _ in decoding], np.int64)
        contexts = [context for _, _, context in decoding]
        longest = -(-max(contexts) // size)
        rows = (table[torch.from_numpy(slots), : longest * size : size] // size).to(torch.int64)
        tokens = torch.tensor(contexts)
        live = torch.arange(longest)[None, :] * size < tokens[:, None]
        rows = torch.where(live, rows, 0)  # beyond a request's pages req_to_token holds leftovers
        newest = tokens - 1
        born = torch.where(newest % size == 0, newest // size, -1).to(torch.int32)
        plans: dict[PageBudget, SpanPlan] = {}
        for budget in set(self.runtime.budgets):
            spans = [budget.span(context) for context in contexts]
            counts = np.array([span.selected for span in spans])
            # The open page is the last of the selected ones: all before it are full.
            plans[budget] = SpanPlan(spans, counts, torch.from_numpy(counts - 1) * size + newest % size + 1)
        return DecodePlan(
            torch.tensor([where for where, _, _ in decoding]),
            tokens,
            rows,
            slots,
            rows.gather(1, (newest // size)[:, None])[:, 0],
            newest % size,
            born.numpy(),
            plans,
        )

    # -- run --------------------------------------------------------------------------------------------------------------------

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, **extra: Any
    ) -> torch.Tensor:
        """Chunks of prefill, and in a mixed batch the decoding tokens too. See :meth:`_run` for shapes."""
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, **extra: Any
    ) -> torch.Tensor:
        """One token a request. See :meth:`_run` for shapes."""
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """``q [T, Hq * D]``, ``k, v [T, H * D]`` or ``[T, H, D]`` -> ``[T, Hq * D]``."""
        runtime = self.runtime
        if layer.layer_id not in self._checked:
            check_layer(layer, save_kv_cache, extra)
            self._checked.add(layer.layer_id)
        stats = runtime.stats
        assert stats is not None
        number = layer.layer_id - self.first_layer
        heads, dim = runtime.kv_heads, runtime.pool.head_dim
        k = k.view(-1, heads, dim)
        v = v.view(-1, heads, dim)
        query = q.view(-1, runtime.query_heads, dim)
        out = torch.empty_like(query)

        begin = clock()
        store_tokens(runtime.home.kv[number], forward_batch.out_cache_loc, k, v)
        runtime.home.link.add("write", number, k.shape[0] * runtime.home.token_bytes)
        stats.phases["offload"] += clock() - begin
        for plan in self.prefills:
            chunk = slice(plan.start, plan.end)
            out[chunk] = self._prefill(number, plan, query[chunk], k[chunk], v[chunk], layer.scaling, stats)
        if self.decode is not None:
            where = self.decode.where
            out[where] = self._decode(number, self.decode, query[where], k[where], v[where], layer.scaling, stats)
        return out.view(q.shape)

    def _prefill(
        self, number: int, plan: PrefillPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, stats: StepStats
    ) -> torch.Tensor:
        """Exact dense attention of one chunk; fills the rows' frames when it is the request's last."""
        runtime = self.runtime
        size = runtime.page_size
        summaries = runtime.summaries[number]
        begin = clock()
        if summaries is not None:
            runtime.indexer.index_chunk(summaries, k, plan.pages[plan.prefix // size :], plan.prefix % size, size)
        stats.phases["index"] += clock() - begin

        warm = _WarmRows(runtime, number, plan, q[-1], scale, stats) if plan.warm else None
        begin = clock()
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        queries = q.transpose(0, 1)
        out, lse = attend_dense(queries, keys, values, scale, causal=True)
        stats.phases["attend"] += clock() - begin
        pages = -(-plan.prefix // size)
        piece = max(1, runtime.config.workspace_tokens // size)
        carry: tuple[torch.Tensor, torch.Tensor] | None = None
        for first in range(0, pages, piece):
            last = min(first + piece, pages)
            begin = clock()
            k_piece, v_piece = gather_prefix(runtime.home.kv[number], plan.pages[first:last], min(plan.prefix - first * size, (last - first) * size))
            runtime.home.link.add("prefix", number, (last - first) * runtime.kv_heads * runtime.home.head_page_bytes)
            gathered = clock()
            stats.phases["retrieve"] += gathered - begin
            part, part_lse = attend_dense(queries, k_piece, v_piece, scale, causal=False)
            out, lse = merge_partials(out, lse, part, part_lse)
            stats.phases["attend"] += clock() - gathered
            if warm is not None:
                warm.fill(first, k_piece, v_piece)
                rest = plan.prefix % size if last == pages else 0
                carry = (k_piece[:, -rest:], v_piece[:, -rest:]) if rest else None
        if warm is not None:
            if carry is not None:  # the chunk begins inside a page
                keys, values = torch.cat((carry[0], keys), 1), torch.cat((carry[1], values), 1)
            warm.fill(plan.prefix // size, keys, values)
        return out.transpose(0, 1)

    def _decode(
        self, number: int, plan: DecodePlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, stats: StepStats
    ) -> torch.Tensor:
        """Select, retrieve and attend one token a request."""
        runtime = self.runtime
        rows = runtime.device.layers[number]
        algorithm = runtime.algorithms[number]
        summaries = runtime.summaries[number]
        query = q.view(q.shape[0], runtime.kv_heads, -1, q.shape[-1])
        begin = clock()
        if summaries is not None:
            runtime.indexer.index_token(summaries, k, plan.page, plan.offset)
        indexed = clock()
        attended = plan.spans[runtime.budgets[number]]
        view = RowsView(attended.spans, plan.table, plan.tokens, summaries, runtime.home.kv[number], scale)
        pages = algorithm.select(query, view)
        stats.decode_pages.append(pages)
        selected = clock()
        frames = self._retrieve(number, plan, rows, pages, stats)
        pool = runtime.device.pool
        counts = attended.counts
        newest = torch.from_numpy(frames[np.arange(len(counts)), :, counts - 1].astype(np.int64))
        append_token(pool.k, pool.v, newest, plan.offset, k, v)
        retrieved = clock()
        out = attend_frames(query, pool.k, pool.v, torch.from_numpy(frames.astype(np.int64)), attended.valid, scale)
        phases = stats.phases
        phases["index"] += indexed - begin
        phases["select"] += selected - indexed
        phases["retrieve"] += retrieved - selected
        phases["attend"] += clock() - retrieved
        return out.reshape(q.shape)

    def _retrieve(self, number: int, plan: DecodePlan, rows: LayerRows, pages: PageIds, stats: StepStats) -> npt.NDArray[np.int32]:
        """Frames ``[B, H, S]`` of the selected pages; misses are gathered from home, padding names the dummy frame."""
        runtime = self.runtime
        heads = runtime.kv_heads
        flat = pages.reshape(-1, pages.shape[-1])
        numbers = rows.rows_of(plan.slots)
        access = rows.lru.access(numbers, flat, np.repeat(plan.born, heads))
        frames = np.where(access.slots >= 0, rows.frames[numbers[:, None], np.maximum(access.slots, 0)], DUMMY)
        row, col = np.nonzero(access.miss)
        if len(row):
            home_pages = plan.table[torch.from_numpy(row // heads), torch.from_numpy(flat[row, col].astype(np.int64))]
            pool = runtime.device.pool
            targets = torch.from_numpy(frames[row, col].astype(np.int64))
            gather_pages(runtime.home.kv[number], home_pages, torch.from_numpy(row % heads), pool.k, pool.v, targets)
            runtime.home.link.add("demand", number, len(row) * runtime.home.head_page_bytes)
        stats.selected[number] += int((flat >= 0).sum())
        stats.hits[number] += int(access.hit.sum())
        stats.misses[number] += len(row)
        stats.born[number] += int(access.born.sum())
        return frames.reshape(pages.shape)


class _WarmRows:
    """Warm start: after the last chunk the pages that its last query selects get frames, straight from the prefill workspace.

    Nothing crosses the link: the layer's keys and values pass through the workspace for the chunk's own attention anyway.
    """

    def __init__(self, runtime: SparseRuntime, number: int, plan: PrefillPlan, q: torch.Tensor, scale: float, stats: StepStats) -> None:
        begin = clock()
        self.runtime = runtime
        tokens = plan.prefix + plan.end - plan.start
        query = q.view(1, runtime.kv_heads, -1, q.shape[-1])
        view = RowsView(
            [runtime.budgets[number].span(tokens)],
            plan.pages[None, :],
            torch.tensor([tokens]),
            runtime.summaries[number],
            runtime.home.kv[number],
            scale,
        )
        self.pages = runtime.algorithms[number].select(query, view)[0]
        rows = runtime.device.layers[number]
        numbers = rows.rows_of(np.array([plan.slot]))
        slots = rows.lru.warm(numbers, self.pages)
        self.frames = np.where(slots >= 0, rows.frames[numbers[:, None], np.maximum(slots, 0)], DUMMY)
        stats.warm_pages.setdefault(plan.place, []).append(self.pages)
        stats.phases["select"] += clock() - begin

    def fill(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the selected pages among pages ``first ...`` whose ``keys, values [H, T, D]`` are here."""
        pool = self.runtime.device.pool
        size = self.runtime.page_size
        count = -(-keys.shape[1] // size)
        head, col = np.nonzero((self.pages >= first) & (self.pages < first + count) & (self.frames != DUMMY))
        if not len(head):
            return
        short = count * size - keys.shape[1]
        if short:
            keys = torch.nn.functional.pad(keys, (0, 0, 0, short))
            values = torch.nn.functional.pad(values, (0, 0, 0, short))
        where = torch.from_numpy(head), torch.from_numpy(self.pages[head, col].astype(np.int64) - first)
        frames = torch.from_numpy(self.frames[head, col].astype(np.int64))
        pool.k[frames] = keys.reshape(keys.shape[0], count, size, -1)[where].to(pool.k.dtype)
        pool.v[frames] = values.reshape(values.shape[0], count, size, -1)[where].to(pool.v.dtype)
