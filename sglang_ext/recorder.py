"""Writes the run as it is served (DESIGN section 7). No text and no token ids: page hashes are keyed with a salt that is thrown away."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sglang_ext import __version__
from sglang_ext.runtime import LiveRequest, SparseRuntime, StepEntry, StepStats
from traces.schema import DECODE, WARM, ModelShape, RequestRecord, RunMeta, ServerShape, SparseShape, StepRecord
from traces.writer import TraceWriter


class Recorder:
    """Turns steps and requests of the serving process into trace records."""

    def __init__(self, runtime: SparseRuntime, directory: str, server_args: Any, *, model_name: str, max_running: int) -> None:
        self.runtime = runtime
        self.epoch = time.time_ns()
        self.steps = 0
        self.cost_ns = 0
        self._salt = secrets.token_bytes(16)
        self.writer = TraceWriter(Path(directory), describe_run(runtime, server_args, model_name, max_running, self.epoch))

    def step(self, entries: list[StepEntry], stats: StepStats, scheduler: Any) -> None:
        """Record the step that just ran."""
        begin = time.perf_counter_ns()
        end_ns = time.time_ns() - self.epoch
        runtime = self.runtime
        decoding = [entry.decoding for entry in entries]
        mode = "decode" if all(decoding) else ("mixed" if any(decoding) else "prefill")
        link = runtime.home.link.take_step()
        self.writer.step(
            # The values are ours: the reader validates.
            StepRecord.model_construct(
                step=self.steps,
                mode=mode,
                start_ns=stats.start_ns - self.epoch,
                end_ns=end_ns,
                forward_ns=stats.forward_ns,
                requests=tuple(entry.live.number for entry in entries),
                prefix_tokens=tuple(stats.prefix_tokens),
                new_tokens=tuple(stats.new_tokens),
                decoding=tuple(decoding),
                running=len(scheduler.running_batch.reqs),
                waiting=len(scheduler.waiting_queue),
                index_ns=stats.phases["index"],
                offload_ns=stats.phases["offload"],
                select_ns=stats.phases["select"],
                retrieve_ns=stats.phases["retrieve"],
                attend_ns=stats.phases["attend"],
                selected=tuple(stats.selected),
                hits=tuple(stats.hits),
                misses=tuple(stats.misses),
                born=tuple(stats.born),
                demand_bytes=tuple(link["demand"]),
                prefix_bytes=tuple(link["prefix"]),
                write_bytes=tuple(link["write"]),
                frames_used=runtime.device.used,
                home_used=runtime.home_tokens_used(),
            )
        )
        self._selections(entries, stats)
        self.steps += 1
        self.cost_ns += time.perf_counter_ns() - begin

    def _selections(self, entries: list[StepEntry], stats: StepStats) -> None:
        if stats.decode_pages:
            packed = _pack(stats.decode_pages)
            places = [place for place, entry in enumerate(entries) if entry.decoding]
            for b, place in enumerate(places):
                context = stats.prefix_tokens[place] + stats.new_tokens[place]
                self.writer.selection(self.steps, entries[place].live.number, context, DECODE, packed[:, b])
        for place, layers in stats.warm_pages.items():
            context = stats.prefix_tokens[place] + stats.new_tokens[place]
            self.writer.selection(self.steps, entries[place].live.number, context, WARM, _pack([pages[None] for pages in layers])[:, 0])

    def request(self, live: LiveRequest, req: Any, now: int) -> None:
        """Record a request that ended at ``now`` (``time.time_ns()``)."""
        begin = time.perf_counter_ns()
        reason = (req.finished_reason or req.to_finish) if live.scheduled_ns is not None else None
        kind = type(reason).__name__ if reason is not None else "FINISH_ABORT"
        status: Literal["finished", "aborted", "refused"] = "refused" if live.refused else ("aborted" if kind == "FINISH_ABORT" else "finished")
        tokens = [*req.origin_input_ids, *req.output_ids]

        def since(at: int | None) -> int | None:
            return None if at is None else at - self.epoch

        self.writer.request(
            RequestRecord(
                id=live.number,
                arrival_ns=live.arrival_ns - self.epoch,
                scheduled_ns=since(live.scheduled_ns),
                first_token_ns=since(live.first_token_ns),
                finish_ns=now - self.epoch if live.first_token_ns is not None else None,
                prompt_tokens=live.prompt_tokens,
                output_tokens=len(req.output_ids),
                max_new_tokens=live.max_new_tokens,
                cached_tokens=live.cached_tokens or 0,
                page_hashes=page_hashes(tokens, self.runtime.page_size, self._salt),
                retractions=live.retractions,
                status=status,
            )
        )
        self.cost_ns += time.perf_counter_ns() - begin

    def checkpoint(self) -> None:
        """The server is idle: what is on disk is a complete run from here on."""
        self.writer.checkpoint({**self.runtime.counters(), "sparse_recorder_ns": self.cost_ns})


def page_hashes(tokens: list[int], page_size: int, salt: bytes) -> tuple[str, ...]:
    """Chained keyed hash of every full page: equal prefixes give equal hashes, and nothing leads back to the tokens."""
    array = np.asarray(tokens, np.int64)
    hashes: list[str] = []
    previous = b""
    for first in range(0, len(array) - page_size + 1, page_size):
        digest = hashlib.blake2b(previous + array[first : first + page_size].tobytes(), digest_size=8, key=salt).digest()
        hashes.append(digest.hex())
        previous = digest
    return tuple(hashes)


def _pack(layers: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """``[B, H, S_l]`` a layer -> ``[L, B, H, max S]``, -1 padded: dense layers select more pages than the others."""
    width = max(pages.shape[-1] for pages in layers)
    if all(pages.shape[-1] == width for pages in layers):
        return np.stack(layers)
    packed = np.full((len(layers), *layers[0].shape[:-1], width), -1, np.int32)
    for number, pages in enumerate(layers):
        packed[number, ..., : pages.shape[-1]] = pages
    return packed


def describe_run(runtime: SparseRuntime, server_args: Any, model_name: str, max_running: int, epoch: int) -> RunMeta:
    """Head of the trace."""
    pool, config = runtime.pool, runtime.config
    import torch

    return RunMeta(
        epoch_ns=epoch,
        seed=int(server_args.random_seed or 0),
        model=ModelShape(
            name=model_name,
            layers=runtime.layers,
            query_heads=runtime.query_heads,
            kv_heads=runtime.kv_heads,
            head_dim=pool.head_dim,
            kv_dtype=str(pool.store_dtype).removeprefix("torch."),
            kv_itemsize=pool.store_dtype.itemsize,
        ),
        server=ServerShape(
            page_size=runtime.page_size,
            chunked_prefill_size=int(server_args.chunked_prefill_size or -1),
            max_prefill_tokens=server_args.max_prefill_tokens,
            max_running_requests=max_running,
            home_tokens=pool.size,
            device_frames=runtime.ledger.total,
            context_length=runtime.context_length,
            schedule_policy=server_args.schedule_policy,
            overlap=not server_args.disable_overlap_schedule,
            mixed_chunk=bool(server_args.enable_mixed_chunk),
            radix_cache=not server_args.disable_radix_cache,
        ),
        sparse=SparseShape(
            algorithm=config.algorithm,
            budget=config.budget,
            sink=config.sink,
            window=config.window,
            dense_layers=config.dense_layers,
            buffer_factor=config.buffer_factor,
        ),
        hardware={
            "platform": "cpu" if pool.device == "cpu" else torch.cuda.get_device_name(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
        },
        versions={name: version(name) for name in ("sglang", "torch", "numpy")} | {"sglang-ext": __version__, "python": platform.python_version()},
    )
