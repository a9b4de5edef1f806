"""Record a small run of the real model for ``traces/samples/``: questions on two documents, arriving at random, decoded sparse.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m benchmarks.record_sample --out traces/samples/smollm2-cpu

One thread keeps step times steady on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--document", type=int, default=1600, help="tokens of a document")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between arrivals")
    parser.add_argument("--buffer-factor", default="3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import sglang
    from transformers import AutoTokenizer

    from benchmarks.needles import stdlib_paragraphs

    ids = AutoTokenizer.from_pretrained(args.model).encode("\n\n".join(stdlib_paragraphs()), add_special_tokens=False)
    documents = [ids[: args.document], ids[args.document : 2 * args.document]]
    engine = sglang.Engine(
        model_path=args.model, dtype="float32", device="cpu", disable_cuda_graph=True, log_level="warning", random_seed=args.seed, sleep_on_idle=True,
        chunked_prefill_size=512, max_running_requests=4, enable_mixed_chunk=True, sparse_algorithm="quest", sparse_budget="256", sparse_sink="16",
        sparse_window="64", sparse_buffer_factor=args.buffer_factor, sparse_dense_layers="0", sparse_host_memory="16384",
        sparse_device_memory="0.35GiB", sparse_trace=str(args.out),
    )  # fmt: skip
    rng = random.Random(args.seed)
    at = 0.0
    plans: list[tuple[float, list[int], int]] = []
    for number in range(args.requests):
        start = rng.randrange(4 * args.document, len(ids) - 200)
        prompt = documents[number % 2][: rng.randrange(args.document // 2, args.document)] + ids[start : start + rng.randrange(20, 120)]
        plans.append((at, prompt, rng.randrange(24, 72)))
        at += rng.expovariate(1 / args.gap)

    async def ask(after: float, prompt: list[int], new_tokens: int) -> Any:
        await asyncio.sleep(after)
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return await engine.async_generate(input_ids=prompt, sampling_params=sampling)

    async def everything() -> None:
        await asyncio.gather(*(ask(*plan) for plan in plans))

    begin = time.monotonic()
    engine.loop.run_until_complete(everything())
    print(f"{args.requests} requests in {time.monotonic() - begin:.1f} s, recorded into {args.out}")
    time.sleep(2)  # the idle scheduler completes the recording
    engine.shutdown()


if __name__ == "__main__":
    main()
