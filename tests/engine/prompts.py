"""Prompts of real text at the lengths that matter: one token, around a page, around a chunk, longer than both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.engine.harness import MODEL

SHORT = (1, 15, 16, 17, 300, 700)
"""What ``make test`` sends."""
LENGTHS = (1, 15, 16, 17, 300, 2047, 2048, 2049, 6000)
"""What ``--full`` sends."""
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
    """What is sent to dense SGLang and to us; ``full`` has the long prompts and asks for 64 tokens instead of 16."""
    new_tokens = 64 if full else 16
    lengths = LENGTHS if full else SHORT
    prompts = [piece(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    # The same tokens first, then what hits the radix tree at a page boundary and one token beside it on either side.
    base, other = piece(14_000, shared_tokens(full)), piece(16_000, 40)
    prefixes = [base, base + other, base[:-16] + other, base[:-15] + other, base[:-17] + other]
    alike = 400 if full else 100
    return {
        "alone": Sample(prompts, new_tokens, False),
        "batch": Sample(prompts[-8:], new_tokens, True),
        "prefixes": Sample(prefixes, new_tokens, False),
        "equal": Sample([piece(17_000 + alike * number, alike) for number in range(8)], new_tokens, True),
    }


def shared_tokens(full: bool) -> int:
    """Tokens that the prompts of the sample ``prefixes`` share."""
    return 1024 if full else 256
