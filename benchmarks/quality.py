"""Does sparse selection still find what it is asked for? Needles on the real model, dense beside each algorithm and budget.

Strict mode: the context is prefilled dense, the question and the answer are decoded sparse, token by token, by teacher forcing. A cell
holds exact matches (every answer digit is the argmax) and the mean log-probability of a digit. One engine serves all settings; contexts
are prefilled once and found again by the radix cache.

    python -m benchmarks.quality --out benchmarks/results/cpu/quality.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_machine

ORDER = ("dense", "streaming", "quest", "oracle")


def settings_of(budgets: list[int], sink: int, window: int, algorithms: list[str]) -> list[dict[str, Any]]:
    """Configurations: dense once, each other algorithm at each budget."""
    rows: list[dict[str, Any]] = []
    for algorithm in algorithms:
        if algorithm == "dense":
            rows.append({"algorithm": "dense"})
        else:
            rows.extend({"algorithm": algorithm, "budget": budget, "sink": sink, "window": window} for budget in budgets)
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--algorithms", nargs="+", default=list(ORDER), choices=ORDER)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--haystack", type=Path, nargs="*", default=[], help="text or HTML files instead of the standard library's docstrings")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import sglang
    from transformers import AutoTokenizer

    from benchmarks.forcing import ForceTokens
    from benchmarks.needles import build_needle, file_paragraphs, stdlib_paragraphs

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    paragraphs = file_paragraphs(args.haystack) if args.haystack else stdlib_paragraphs()
    needles = {
        (length, keys, seed): build_needle(tokenizer, paragraphs, length, keys, seed)
        for length in args.lengths
        for keys in args.keys
        for seed in range(args.samples)
    }
    home = sum(len(needle.context) for needle in needles.values()) + args.samples * 512 + 4096
    engine = sglang.Engine(
        model_path=args.model, dtype="float32", device="cpu", disable_cuda_graph=True, log_level="warning", random_seed=0,
        enable_custom_logit_processor=True, sparse_algorithm="quest", sparse_budget=str(1024), sparse_host_memory=str(home),
        sparse_device_memory=str(args.samples * (max(args.lengths) + 512)), max_running_requests=args.samples,
    )  # fmt: skip
    rows = []
    for config in settings_of(args.budgets, args.sink, args.window, args.algorithms):
        _reconfigure(engine, {**config, "device_memory": args.samples * (max(args.lengths) + 512)})
        for length in args.lengths:
            for keys in args.keys:
                begin = time.monotonic()
                cell = [needles[length, keys, seed] for seed in range(args.samples)]
                said = _force(engine, cell, ForceTokens.to_str())
                digits = [one[len(needle.question) :] for one, needle in zip(said, cell, strict=True)]
                logprobs = [value for one in digits for value, _ in one]
                row = {
                    "length": length, "keys": keys, "algorithm": config["algorithm"], "budget": config.get("budget"), "samples": args.samples,
                    "exact": sum(all(hit for _, hit in one) for one in digits), "digit_logprob": round(sum(logprobs) / len(logprobs), 4),
                }  # fmt: skip
                rows.append(row)
                print(f"{row}  [{time.monotonic() - begin:.0f} s]", flush=True)
    engine.shutdown()
    result = {
        "benchmark": "quality",
        "settings": {
            "machine": describe_machine(), "versions": {name: version(name) for name in ("sglang", "torch", "transformers")},
            "model": "SmolLM2-135M-Instruct (Q4_1 GGUF dequantised), float32", "page_size": 16, "sink": args.sink, "window": args.window, "mode": "strict",
            "haystack": [path.name for path in args.haystack] or f"standard library docstrings, {len(paragraphs)} paragraphs, "
            f"sha256 {hashlib.sha256(''.join(paragraphs).encode()).hexdigest()[:16]}",
            "seeds": list(range(args.samples)),
        },
        "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(render(rows))


def render(rows: list[dict[str, Any]]) -> str:
    """The table: a column a (keys, length), a row a setting, ``exact/samples (log-probability a digit)``."""
    columns = list(dict.fromkeys((row["keys"], row["length"]) for row in rows))
    lines = ["| algorithm | budget | " + " | ".join(f"{'single' if keys == 1 else f'{keys} keys'} {length // 1024}K" for keys, length in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for setting in dict.fromkeys((row["algorithm"], row["budget"]) for row in rows):
        cells = {(row["keys"], row["length"]): row for row in rows if (row["algorithm"], row["budget"]) == setting}
        texts = (f"{cells[c]['exact']}/{cells[c]['samples']} ({cells[c]['digit_logprob']:.2f})" for c in columns)
        lines.append(f"| {setting[0]} | {setting[1] or 'all'} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _reconfigure(engine: Any, config: dict[str, Any]) -> None:
    for attempt in range(50):
        try:
            engine.collective_rpc("sparse_reconfigure", config=json.dumps(config), keep_cache=True)
            return
        except AssertionError as error:
            if "not idle" not in str(error) or attempt == 49:
                raise
            time.sleep(0.1)


def _force(engine: Any, cell: list[Any], processor: str) -> list[list[tuple[float, bool]]]:
    """Say question and answer of each needle; ``(log-probability, is argmax)`` of each token."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "said.jsonl")
        forced = [needle.question + needle.answer for needle in cell]
        engine.generate(
            input_ids=[needle.context for needle in cell],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": len(tokens), "ignore_eos": True, "custom_params": {"force": tokens, "out": out, "sample": number}}
                for number, tokens in enumerate(forced)
            ],
            custom_logit_processor=[processor] * len(cell),
        )
        lines = [json.loads(line) for line in Path(out).read_text(encoding="utf-8").splitlines()]
    said = {line["sample"]: line["said"] for line in lines}
    return [said[number] for number in range(len(cell))]


if __name__ == "__main__":
    main()
