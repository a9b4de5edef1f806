"""Hooks into stock SGLang's scheduler: arrival and refusal, admission by frames, the step in progress, the end of a request.

Each is an AROUND hook that passes through when the process serves no sparse run. Arguments are looked up by position only where
SGLang passes them so; results are handed on untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_ext.policy.admission import AdmissionError
from sglang_ext.runtime import LiveRequest, SparseRuntime, StepEntry, get_runtime

Original = Callable[..., Any]


def add_request_to_queue(original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request arrives, or comes back after a retraction. One that can never fit is refused with the arithmetic."""
    runtime = get_runtime()
    if runtime is not None and req.rid not in runtime.live:
        prompt = len(req.origin_input_ids)
        live = runtime.arrive(req.rid, prompt, req.sampling_params.max_new_tokens or 0)
        try:
            runtime.ledger.check_possible(live.max_tokens)
        except AdmissionError as error:
            req.set_finish_with_abort(str(error))
            live.refused = True
            runtime.totals["sparse_refused_requests"] += 1
        if req.to_finish is not None:
            # SGLang runs one token of a refused request to send the answer on; that is all it may reserve.
            live.prompt_tokens, live.max_new_tokens = len(req.origin_input_ids), 0
            live.refused = True
    return original(scheduler, req, *args, **kwargs)


def add_one_req(original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Admission by both tiers: frames are reserved first, then SGLang counts home's slots. No frames now: the request waits."""
    runtime = get_runtime()
    if runtime is None:
        return original(adder, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    live = runtime.live[req.rid]
    if runtime.ledger.admit(live.rid, live.max_tokens) is None:
        return AddReqResult.NO_TOKEN
    result = original(adder, req, *args, **kwargs)
    if not any(other is req for other in adder.can_run_list):
        runtime.ledger.release(live.rid)
    return result


def run_batch(original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """One step: who is in it, what it did, for counters and recorder."""
    runtime = get_runtime()
    if runtime is None or batch.forward_mode.is_idle():
        return original(scheduler, batch, *args, **kwargs)
    _record_ended(runtime)
    now = time.time_ns()
    entries = []
    for req in batch.reqs:
        live = runtime.live[req.rid]
        if live.scheduled_ns is None:
            live.scheduled_ns = now
            live.cached_tokens = len(req.prefix_indices)
        last = not live.decoding and req is not batch.chunked_req
        entries.append(StepEntry(live, int(req.req_pool_idx), live.decoding, last))
    runtime.begin_step(entries)
    result = original(scheduler, batch, *args, **kwargs)
    stats = runtime.end_step()
    if runtime.recorder is not None:
        runtime.recorder.step(entries, stats, scheduler)
    return result


def model_forward(original: Original, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Time of the model's forward inside a step."""
    runtime = get_runtime()
    if runtime is None or runtime.stats is None:
        return original(runner, *args, **kwargs)
    stats = runtime.stats
    begin = time.perf_counter_ns()
    result = original(runner, *args, **kwargs)
    stats.forward_ns += time.perf_counter_ns() - begin
    return result


def process_batch_result(original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Tokens are handed on: first-token and finish times."""
    runtime = get_runtime()
    result = original(scheduler, batch, *args, **kwargs)
    if runtime is None:
        return result
    now = time.time_ns()
    for req in batch.reqs:
        live = runtime.live.get(req.rid)
        if live is None:
            continue
        if live.first_token_ns is None and len(req.output_ids):
            live.first_token_ns = now
    _record_ended(runtime)
    return result


def release_kv_cache(original: Original, req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> Any:
    """A request ends or is retracted: its rows give their frames back after SGLang took its home slots."""
    runtime = get_runtime()
    live = runtime.live.get(req.rid) if runtime is not None else None
    result = original(req, tree_cache, *args, **kwargs)
    if runtime is not None and live is not None:
        runtime.unbind(live)
        if req.finished() or req.to_finish is not None:
            runtime.ending.append((live, req))
        else:
            live.retractions += 1
            runtime.retractions += 1
    return result


def abort_request(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Requests aborted while they wait leave the queue without a release: they hold nothing, but are known."""
    runtime = get_runtime()
    if runtime is None:
        return original(scheduler, *args, **kwargs)
    before = list(scheduler.waiting_queue)
    result = original(scheduler, *args, **kwargs)
    for req in before:
        if not any(other is req for other in scheduler.waiting_queue):
            live = runtime.live.get(req.rid)
            if live is not None:
                runtime.unbind(live)
                runtime.ending.append((live, req))
    _record_ended(runtime)
    return result


def on_idle(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The server is idle: SGLang checks itself, then we do, and the recording becomes complete up to here."""
    result = original(scheduler, *args, **kwargs)
    runtime = get_runtime()
    if runtime is not None and runtime.idle_work and scheduler.is_fully_idle():
        runtime.idle_work = False
        _record_ended(runtime)
        runtime.check_integrity()
        check = getattr(scheduler.tree_cache, "check_integrity", None)
        if check is not None:
            check(scheduler.token_to_kv_pool_allocator)
        log_sparse = getattr(scheduler.metrics_collector, "log_sparse", None)
        if log_sparse is not None:
            log_sparse()
        if runtime.recorder is not None:
            runtime.recorder.checkpoint()
    return result


def _record_ended(runtime: SparseRuntime) -> None:
    """Forget requests whose end was seen, and write their records."""
    if not runtime.ending:
        return
    ending: list[tuple[LiveRequest, Any]] = list(runtime.ending)
    runtime.ending.clear()
    now = time.time_ns()
    for live, req in ending:
        if runtime.live.pop(live.rid, None) is not None and runtime.recorder is not None:
            runtime.recorder.request(live, req, now)
