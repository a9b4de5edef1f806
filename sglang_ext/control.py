"""Change and inspect the sparse run of an idle engine, for tests and studies: one engine start serves many configurations.

Called through SGLang's own ``Engine.collective_rpc("sparse_reconfigure", config="{...}")``; not reachable over HTTP. What can't be
changed is what SGLang sized at start: home, page size, request slots.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sglang_ext.algorithms import check_algorithm
from sglang_ext.algorithms.base import PageIds, RowsView, SparseAlgorithm
from sglang_ext.config import build_config
from sglang_ext.runtime import SparseRuntime, get_runtime, set_runtime


class _Capture(SparseAlgorithm):
    """An algorithm that writes down its selections."""

    def __init__(self, inner: SparseAlgorithm, layer: int, folder: Path) -> None:
        self.inner = inner
        self.layer = layer
        self.folder = folder
        self.calls = 0

    def select(self, q: torch.Tensor, view: RowsView) -> PageIds:
        pages = self.inner.select(q, view)
        kept = {"layer": self.layer, "q": q, "keys": view.home[view.table][:, :, :, 0], "tokens": view.tokens, "pages": torch.from_numpy(pages)}
        torch.save(kept, self.folder / f"{self.layer:03d}-{self.calls:05d}.pt")
        self.calls += 1
        return pages


def attach(scheduler_class: type, backend: Any, **shape: int) -> None:
    """Give the scheduler of this process the two methods, bound to ``backend``. ``shape`` is what :class:`SparseRuntime` was built with."""

    def sparse_reconfigure(
        self: Any,
        config: str,
        keep_cache: bool = False,
        chunked_prefill_size: int | None = None,
        mixed_chunk: bool | None = None,
        max_running_requests: int | None = None,
    ) -> None:
        """Serve with ``config`` (a JSON object; RPC carries scalars) from now on; the radix tree is emptied unless ``keep_cache``.

        With ``keep_cache`` summaries are carried over and kept up, so the first configuration must be one that keeps them, for every layer.
        """
        old = get_runtime()
        assert old is not None
        if old.live or not self.is_fully_idle():
            raise RuntimeError(f"the engine is not idle ({len(old.live)} requests are live)")
        built = build_config(json.loads(config))
        check_algorithm(built.algorithm)
        if not keep_cache and not self.flush_cache():
            raise RuntimeError("the radix cache could not be emptied")
        if old.recorder is not None:
            old.recorder.checkpoint()
        old.release_device()
        new = SparseRuntime(built, old.pool, old.allocator, kept=old if keep_cache else None, **shape)
        new.home.link.reset()
        if built.trace is not None:
            from sglang_ext.recorder import Recorder

            new.recorder = Recorder(new, built.trace, self.server_args, model_name=Path(str(self.server_args.served_model_name)).name, max_running=self.max_running_requests)
        backend.runtime = new
        set_runtime(new)
        if chunked_prefill_size is not None:
            self.chunked_prefill_size = chunked_prefill_size
        if mixed_chunk is not None:
            self.is_mixed_chunk = mixed_chunk
        if max_running_requests is not None:
            self.max_running_requests = max_running_requests

    def sparse_report(self: Any, path: str) -> None:
        """Check integrity and write counters and pool states to ``path`` as JSON. Raises ``RuntimeError`` when something does not add up."""
        runtime = get_runtime()
        assert runtime is not None
        runtime.check_integrity()
        if runtime.recorder is not None:
            runtime.recorder.checkpoint()
        report = {
            **runtime.counters(),
            "live": len(runtime.live),
            "frames_total": runtime.ledger.total,
            "frames_used": runtime.device.used,
            "home_tokens": runtime.pool.size,
            "home_used": runtime.home_tokens_used(),
            "evictable": int(self.tree_cache.evictable_size()),
            "running_retractions": runtime.retractions,
        }
        Path(path).write_text(json.dumps(report), encoding="utf-8")

    def sparse_capture(self: Any, path: str | None) -> None:
        """From now on keep what every decode selection saw and chose; ``None`` stops and writes nothing more.

        ``path`` becomes a folder with one ``torch.save`` file a call: ``layer``, ``q [B, H, G, D]``, ``keys [B, N, H, P, D]`` of all pages,
        ``tokens [B]``, ``pages [B, H, S]``.
        """
        runtime = get_runtime()
        assert runtime is not None
        runtime.algorithms = [getattr(algorithm, "inner", algorithm) for algorithm in runtime.algorithms]
        if path is not None:
            Path(path).mkdir(parents=True)
            runtime.algorithms = [_Capture(algorithm, layer, Path(path)) for layer, algorithm in enumerate(runtime.algorithms)]

    scheduler_class.sparse_capture = sparse_capture  # type: ignore[attr-defined]
    scheduler_class.sparse_reconfigure = sparse_reconfigure  # type: ignore[attr-defined]
    scheduler_class.sparse_report = sparse_report  # type: ignore[attr-defined]
