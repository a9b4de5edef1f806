"""Needle prompts: facts hidden in technical paragraphs, a question at the end (RULER's form, arXiv 2404.06654).

The haystack is made of paragraphs of the Python standard library's docstrings, which every machine has, or of text files given.
"""

from __future__ import annotations

import gzip
import html
import importlib
import inspect
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = ["argparse", "typing", "logging", "subprocess", "datetime", "unittest", "unittest.mock", "email.message", "http.client", "urllib.request", "asyncio.events", "decimal", "fractions", "statistics", "collections", "functools", "itertools", "threading", "multiprocessing.pool", "concurrent.futures", "pathlib", "shutil", "tarfile", "zipfile", "csv", "configparser", "sqlite3", "json", "pickle", "random", "heapq", "string", "textwrap", "difflib", "inspect", "ast", "contextlib", "dataclasses", "enum", "socket", "ssl", "select", "signal", "tempfile"]
WORDS = ["amber", "anchor", "basil", "beacon", "breeze", "canyon", "cedar", "cobalt", "comet", "copper", "coral", "cotton", "crystal", "dagger", "delta", "ember", "falcon", "fern", "forest", "garnet", "ginger", "glacier", "harbor", "hazel", "indigo", "island", "ivory", "jasmine", "juniper", "lagoon", "lantern", "lemon", "lilac", "linen", "lotus", "maple", "marble", "meadow", "meteor", "nectar", "oasis", "olive", "onyx", "opal", "orchid", "pebble", "pepper", "pine", "plume", "prism", "quartz", "raven", "reef", "ribbon", "river", "saffron", "sage", "sierra", "silver", "slate", "spruce", "summit", "thistle", "timber", "topaz", "tulip", "umber", "valley", "velvet", "violet", "walnut", "willow", "winter", "zephyr", "zinc"]


def stdlib_paragraphs() -> list[str]:
    """Paragraphs of prose from docstrings of the standard library."""
    found: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        owners: list[Any] = [module, *(value for _, value in sorted(vars(module).items()) if inspect.isclass(value) or inspect.isfunction(value))]
        for owner in owners:
            found.extend(_prose(inspect.getdoc(owner) or ""))
            if inspect.isclass(owner):
                for _, member in sorted(vars(owner).items()):
                    if inspect.isfunction(member):
                        found.extend(_prose(inspect.getdoc(member) or ""))
    return list(dict.fromkeys(found))


def file_paragraphs(paths: list[Path]) -> list[str]:
    """Paragraphs of prose from text or HTML files, gzipped or not."""
    found: list[str] = []
    for path in paths:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", errors="replace")
        if ".htm" in path.name:
            text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style|pre).*?</\1>", "", re.sub(r"</?p\b[^>]*>", "\n\n", text))))
        found.extend(_prose(text))
    return list(dict.fromkeys(found))


def _prose(text: str) -> list[str]:
    paragraphs = (" ".join(piece.split()) for piece in re.split(r"\n\s*\n", text))
    return [piece for piece in paragraphs if 80 <= len(piece) <= 700 and piece[0].isupper() and piece[-1] in ".:" and ">>>" not in piece and piece.count("_") < 4]


@dataclass(frozen=True)
class Needle:
    """``context`` is prefilled; ``question`` and ``answer`` follow. Token ids; the answer is the digits."""

    context: list[int]
    question: list[int]
    answer: list[int]


def build_needle(tokenizer: Any, paragraphs: list[str], tokens: int, keys: int, seed: int) -> Needle:
    """A prompt of about ``tokens`` tokens with ``keys`` numbers, one of which is asked for (with more than one, also a passkey and VAR lines)."""
    rng = random.Random(f"{tokens}-{keys}-{seed}")
    words = rng.sample(WORDS, keys)
    numbers = {word: str(rng.randrange(1_000_000, 10_000_000)) for word in words}
    facts = [f"One of the special magic numbers for {word} is: {number}." for word, number in numbers.items()]
    if keys > 1:
        facts.append(f"The pass key is {rng.randrange(10_000, 100_000)}. Remember it. The pass key is easy to mix up with other numbers.")
        facts.extend(f"VAR {''.join(rng.choices('ABCDEFGH', k=5))} = {rng.randrange(10_000, 100_000)}." for _ in range(3))
    asked = rng.choice(words)
    head = "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about the numbers afterwards.\n\n"
    ask = f"\n\nWhat is the special magic number for {asked} mentioned in the provided text?"
    say = f"The special magic number for {asked} mentioned in the provided text is"
    fixed = len(tokenizer.encode(head + ask + say)) + sum(len(tokenizer.encode(fact)) + 1 for fact in facts) + 40
    chosen: list[str] = []
    used = fixed
    pool = rng.sample(paragraphs, len(paragraphs))
    while used < tokens:
        paragraph = pool[len(chosen) % len(pool)]
        used += len(tokenizer.encode(paragraph)) + 1
        chosen.append(paragraph)
    for fact in facts:
        chosen.insert(rng.randrange(len(chosen) + 1), fact)
    text = tokenizer.apply_chat_template([{"role": "user", "content": head + "\n\n".join(chosen) + ask}], tokenize=False, add_generation_prompt=True)
    before, after = text.split(ask)
    # The tokenizer has one token a digit, and one for the space before the number, which is no digit.
    space, *digits = tokenizer.encode(f" {numbers[asked]}", add_special_tokens=False)
    return Needle(
        tokenizer.encode(before, add_special_tokens=False),
        [*tokenizer.encode(ask + after + say, add_special_tokens=False), space],
        digits,
    )
