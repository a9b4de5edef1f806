"""Prompts of real text at the lengths that matter: one token, around a page, around a chunk, longer than both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.engine.harness import MODEL

LENGTHS = (1, 15, 16, 17, 300, 2047, 2048, 2049, 6000)
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


def _lengths() -> list[list[int]]:
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    return [piece(start, length) for start, length in zip(starts, LENGTHS, strict=True)]


def _prefixes() -> list[list[int]]:
    """The same 1024 tokens first, then what hits the radix tree at a page boundary and one token beside it on either side."""
    base = piece(14_000, 1024)
    other = piece(16_000, 40)
    return [base, base + other, base[:1008] + other, base[:1009] + other, base[:1007] + other]


class _Samples(dict[str, Sample]):
    """Built on first use: reading the text needs the model's tokenizer."""

    def _fill(self) -> None:
        if not len(self):
            prompts = _lengths()
            self["alone"] = Sample(prompts, 64, False)
            self["batch"] = Sample([*prompts[:5], *prompts[6:]], 64, True)
            self["prefixes"] = Sample(_prefixes(), 64, False)
            self["equal"] = Sample([piece(17_000 + 400 * number, 400) for number in range(8)], 64, True)

    def items(self):  # type: ignore[no-untyped-def]
        self._fill()
        return super().items()

    def __getitem__(self, name: str) -> Sample:
        self._fill()
        return super().__getitem__(name)


SAMPLES = _Samples()
