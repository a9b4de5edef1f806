"""A real SGLang engine in a process of its own: a scheduler that fails kills its parent, which must not be the test run.

One engine serves many configurations (``sglang_ext.control``), because a start costs more than most tests.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import random
import time
import traceback
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"

BASE: dict[str, Any] = {
    "model_path": str(MODEL),
    "dtype": "float32",
    "device": "cpu",
    "disable_cuda_graph": True,
    "log_level": "warning",
    "random_seed": 1,
    "sleep_on_idle": True,
}


class EngineProcess:
    """Calls go to a child process that holds the engine; an exception there is raised here with its text."""

    def __init__(self, **kwargs: Any) -> None:
        # Threads that spin at a barrier starve each other when the machine does other work too; set before the child loads OpenMP.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: the engine starts processes of its own.
        self._process = context.Process(target=_serve, args=(theirs, {**BASE, **kwargs}))
        self._process.start()
        theirs.close()
        self._answer(600)

    def _answer(self, timeout: float) -> Any:
        end = time.monotonic() + timeout
        while not self._pipe.poll(0.5):
            if not self._process.is_alive():
                raise RuntimeError(f"the engine process ended with exit code {self._process.exitcode}")
            if time.monotonic() > end:
                self._process.kill()
                raise TimeoutError(f"no answer from the engine within {timeout} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def call(self, name: str, *args: Any, timeout: float = 600, **kwargs: Any) -> Any:
        """Run function ``name`` of this module in the engine's process with the engine as its first argument."""
        self._pipe.send((name, args, kwargs))
        return self._answer(timeout)

    def generate(self, prompts: list[list[int]], new_tokens: int = 64, together: bool = True) -> list[dict[str, Any]]:
        """Greedy, exactly ``new_tokens`` each; ``together`` in one batch, else one after the other."""
        return self.call("generate", prompts, new_tokens, together)

    def reconfigure(self, config: dict[str, Any], **kwargs: Any) -> None:
        """See ``sglang_ext.control``."""
        self.call("rpc", "sparse_reconfigure", config=json.dumps(config), **kwargs)

    def report(self) -> dict[str, int]:
        """Integrity check and counters of the idle engine."""
        return self.call("report")

    def close(self) -> None:
        """Stop the engine."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Any, kwargs: dict[str, Any]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import sglang

    try:
        engine = sglang.Engine(**kwargs)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    while (call := pipe.recv()) is not None:
        name, args, arguments = call
        try:
            pipe.send((True, globals()[name](engine, *args, **arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    engine.shutdown()


def generate(engine: Any, prompts: list[list[int]], new_tokens: int, together: bool) -> list[dict[str, Any]]:
    """Token ids and cached tokens of each prompt."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if together:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    else:
        outputs = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    return [{"ids": list(one["output_ids"]), "cached": one["meta_info"]["cached_tokens"]} for one in outputs]


def rpc(engine: Any, method: str, **kwargs: Any) -> None:
    """An RPC to the idle scheduler; its last step may still be on its way out."""
    for attempt in range(40):
        try:
            engine.collective_rpc(method, **kwargs)
            return
        except AssertionError as error:
            if "not idle" not in str(error) or attempt == 39:
                raise
            time.sleep(0.1)


def report(engine: Any) -> dict[str, int]:
    """What ``sparse_report`` writes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        for attempt in range(40):
            rpc(engine, "sparse_report", path=path)
            found: dict[str, int] = json.loads(Path(path).read_text())
            if found["live"] == 0 or attempt == 39:
                return found
            time.sleep(0.1)
    raise AssertionError


def storm(engine: Any, prompts: list[list[int]], lengths: list[int], abort_share: float, parallel: int, seed: int) -> list[Any]:
    """Send all prompts, ``parallel`` at a time, and abort a share of them at random moments.

    Returns token ids of each finished request, ``None`` of an aborted one.
    """
    rng = random.Random(seed)
    plans = [(rng.random() < abort_share, rng.random() ** 2 * 6.0) for _ in prompts]
    gate = asyncio.Semaphore(parallel)

    async def one(number: int) -> Any:
        aborts, delay = plans[number]
        rid = f"storm-{seed}-{number}"
        async with gate:
            sampling = {"temperature": 0, "max_new_tokens": lengths[number], "ignore_eos": True}
            task = asyncio.ensure_future(engine.async_generate(input_ids=prompts[number], sampling_params=sampling, rid=rid))
            if aborts:
                await asyncio.sleep(delay)
                engine.tokenizer_manager.abort_request(rid=rid)
            try:
                answer = await task
            except Exception:
                if not aborts:  # only a request that was to be aborted may end without an answer
                    raise
                return None
        if aborts and (answer["meta_info"]["finish_reason"] or {}).get("type") == "abort":
            return None
        return list(answer["output_ids"])

    async def everything() -> list[Any]:
        return await asyncio.gather(*(one(number) for number in range(len(prompts))))

    return list(engine.loop.run_until_complete(everything()))


def refused(engine: Any, prompt: list[int], new_tokens: int) -> str:
    """The message that a refused request gets."""
    try:
        answer = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": new_tokens})
    except Exception as error:
        return str(error)
    return json.dumps(answer["meta_info"]["finish_reason"])
