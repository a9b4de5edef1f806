"""Entry point of ``sglang.srt.plugins``: flags, attention backend, radix cache backend, hooks.

SGLang logs a plug-in that raises and a hook whose target is gone, and serves on without it. So nothing here may half-work: the backend
checks on construction that every hook is in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

BACKEND = "sparse"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def _hooks() -> dict[str, Callable[..., Any]]:
    from sglang_ext import scheduling

    return {
        f"{_SCHEDULER}._add_request_to_queue": scheduling.add_request_to_queue,
        f"{_SCHEDULER}.run_batch": scheduling.run_batch,
        f"{_SCHEDULER}.process_batch_result": scheduling.process_batch_result,
        f"{_SCHEDULER}.abort_request": scheduling.abort_request,
        f"{_SCHEDULER}.on_idle": scheduling.on_idle,
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": scheduling.add_one_req,
        "sglang.srt.mem_cache.common.release_kv_cache": scheduling.release_kv_cache,
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": scheduling.model_forward,
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": home_bytes,
        "sglang.srt.utils.common.support_triton": support_triton,
    }


def register() -> None:
    """Called by SGLang in every process, before arguments are parsed."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    from sglang_ext.radix_cache import create_radix_cache
    from sglang_ext.server_args import SparseServerArgs

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(create_backend)
    register_radix_cache_backend(BACKEND, create_radix_cache)
    HookRegistry.register("sglang.srt.server_args.ServerArgs", SparseServerArgs, HookType.REPLACE)
    # The registry rewrites module globals, not this class attribute.
    Engine.server_args_class = SparseServerArgs
    for target, hook in _hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


def check_hooks() -> None:
    """Raise ``RuntimeError`` unless every hook is in place (SGLang only logs one that could not be applied)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted((set(_hooks()) | {"sglang.srt.server_args.ServerArgs"}) - HookRegistry._patched)
    if missing:
        from importlib.metadata import version

        raise RuntimeError(f"hooks not in place: {', '.join(missing)}; this plug-in is made for sglang 0.5.17, found {version('sglang')}")


def create_backend(runner: Any) -> Any:
    """Factory of the attention backend ``sparse``, in the scheduler process."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_server_args

    from sglang_ext.attention import SparseAttentionBackend
    from sglang_ext.control import attach
    from sglang_ext.memory.pool import TwoTierPool
    from sglang_ext.refusals import check_model, check_platform
    from sglang_ext.runtime import SparseRuntime, set_runtime

    check_hooks()
    args = get_server_args()
    check_platform(str(runner.device), args.tp_size)
    check_model(runner.model_config)
    pool = runner.token_to_kv_pool
    if not isinstance(pool, TwoTierPool):
        raise RuntimeError(f"the sparse attention backend needs the two-tier pool, SGLang built {type(pool).__name__}")
    config = args.sparse_resolved
    shape = {
        "query_heads": runner.model_config.num_attention_heads // args.tp_size,
        "requests": runner.req_to_token_pool.req_to_token.shape[0],
        "context_length": runner.model_config.context_len,
    }
    runtime = SparseRuntime(config, pool, runner.token_to_kv_pool_allocator, **shape)
    if config.trace is not None:
        from sglang_ext.recorder import Recorder

        runtime.recorder = Recorder(runtime, config.trace, args, model_name=Path(str(args.served_model_name)).name, max_running=runner.max_running_requests)
    set_runtime(runtime)
    logger.info("%s", describe(runtime))
    backend = SparseAttentionBackend(runner, runtime)
    attach(Scheduler, backend, **shape)
    return backend


def describe(runtime: Any) -> str:
    """The start-up line: what is really active."""
    config = runtime.config
    first = runtime.budgets[-1] if len(config.dense_layers) < runtime.layers else runtime.budgets[0]
    budget = "everything" if first.budget is None else (f"{first.budget:g} of the context" if isinstance(first.budget, float) else f"{first.budget} tokens ({first.limit(1)} pages)")
    dense = f", dense layers {list(config.dense_layers)}" if config.dense_layers else ""
    return (
        f"sparse attention active: algorithm {config.algorithm}, a row attends {budget} (sink {config.sink}, window {config.window} inside){dense}; "
        f"page {runtime.page_size}, {runtime.layers} layers x {runtime.kv_heads} KV heads x {runtime.query_heads // runtime.kv_heads} query heads, {runtime.pool.store_dtype}; "
        f"home {runtime.pool.size} tokens ({runtime.home.nbytes / 2**30:.2f} GiB), device {runtime.ledger.total} frames "
        f"({runtime.device.pool.nbytes / 2**30:.2f} GiB), buffer factor {config.buffer_factor:g}; prefix reuse by radix cache; "
        f"trace {config.trace or 'off'}"
    )


def home_bytes(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes that SGLang sizes its KV pool with: home's, where the run is sparse."""
    available = original(configurator, *args, **kwargs)
    server_args = configurator.server_args
    if not getattr(server_args, "sparse_active", False) or configurator.is_draft_worker:
        return available
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    from sglang_ext.refusals import check_model

    check_model(configurator.model_config)  # before anything of the size of home is allocated
    token = int(create_memory_pool_configurator(configurator)._cell_size)
    size = server_args.sparse_resolved.host_memory
    wanted = size.nbytes if size.nbytes is not None else size.tokens * token
    import psutil

    free = psutil.virtual_memory().available
    if wanted > free:
        raise ValueError(
            f"--sparse-host-memory {size} is {wanted / 2**30:.2f} GiB ({token} bytes a token of this model); {free / 2**30:.2f} GiB of main memory are available"
        )
    page = token * server_args.page_size
    if wanted < page:
        raise ValueError(f"--sparse-host-memory {size} holds no page: one is {page} bytes ({server_args.page_size} tokens x {token} bytes)")
    return int(wanted)


def support_triton(original: Callable[..., bool], backend: str) -> bool:
    """Our backend's name must not send SGLang to Triton kernels where there is no GPU for them."""
    if backend == BACKEND:
        import torch

        return torch.cuda.is_available()
    return original(backend)
