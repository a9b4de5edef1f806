"""Prompts of real text at the lengths that matter: one token, around a page, around a chunk, longer than both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.engine.harness import MODEL

LENGTHS = (1, 15, 16, 17, 300, 2047, 2048, 2049)
"""Without ``--full``."""
LONGEST = 6000
PAGE = 16


@dataclass(frozen=True)
class Sample:
    """Prompts sent one after the other or ``together``."""

    prompts: list[list[int]]
    new_tokens: int
    together: bool


@cache
def text_tokens() -> list[int]:
    """Token ids of the standard library's docstrings, in order."""
    from transformers import AutoTokenizer

    from benchmarks.needles import stdlib_paragraphs

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    ids: list[int] = tokenizer.encode("\n\n".join(stdlib_paragraphs()), add_special_tokens=False)
    return ids


def piece(start: int, length: int) -> list[int]:
    """``length`` tokens of the text from ``start``."""
    ids = text_tokens()
    assert start + length <= len(ids), f"the text has {len(ids)} tokens"
    return ids[start : start + length]


@cache
def samples(full: bool) -> dict[str, Sample]:
    """What is sent to dense SGLang and to us; ``full`` adds the longest prompt and asks for 64 tokens instead of 24."""
    new_tokens = 64 if full else 24
    lengths = [*LENGTHS, LONGEST] if full else list(LENGTHS)
    prompts = [piece(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    # The same 1024 tokens first, then what hits the radix tree at a page boundary and one token beside it on either side.
    base, other = piece(14_000, 1024), piece(16_000, 40)
    prefixes = [base, base + other, base[:1008] + other, base[:1009] + other, base[:1007] + other]
    return {
        "alone": Sample(prompts, new_tokens, False),
        "batch": Sample(prompts[-8:], new_tokens, True),
        "prefixes": Sample(prefixes, new_tokens, False),
        "equal": Sample([piece(17_000 + 400 * number, 400) for number in range(8)], new_tokens, True),
    }
