"""Tables of the demo, and the reading of ``/metrics`` behind them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from sglang_ext.demo.questions import QUESTIONS, Question, first_line
from sglang_ext.demo.server import Answer

SERIES = re.compile(r"^sglang:(sparse_\w+?)(?:_total)?(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Shape:
    """Of the model: how many rows a request has at one step, and how long a page is."""

    layers: int
    kv_heads: int
    page: int = 16

    def context_pages(self, answers: Sequence[Answer]) -> int:
        """Pages that dense decoding would read: the first token comes from the prefill, each further one from a step over all before it."""
        steps = (-(-(a.prompt_tokens + done) // self.page) for a in answers for done in range(1, a.completion_tokens))
        return sum(steps) * self.layers * self.kv_heads


def parse_metrics(text: str) -> dict[str, int]:
    """The ``sglang:sparse_*`` series of Prometheus text, without their prefix and the ``_total`` of counters."""
    return {name: int(float(value)) for name, value in SERIES.findall(text)}


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Counters as they grew; gauges (``..._used``, ``..._free``) as they are."""
    return {name: value if name.endswith(("_used", "_free")) else value - before.get(name, 0) for name, value in after.items()}


def mark(right: bool) -> str:
    """Right or wrong, also without colours."""
    return "[green]ok[/green]" if right else "[red]wrong[/red]"


def answers_table(dense: Sequence[Answer], sparse: Sequence[Answer], questions: Sequence[Question] = QUESTIONS) -> Table:
    """One line a question; the answers side by side."""
    table = Table(title="Same questions, dense and sparse", title_justify="left")
    for name, width in (("question", 30), ("expected", 18), ("dense", 19), ("", 5), ("sparse", 19), ("", 5)):
        table.add_column(name, max_width=width)
    for question, one, other in zip(questions, dense, sparse, strict=True):
        table.add_row(
            question.text,
            question.expected,
            *(escape(first_line(one.text)), mark(question.accepts(one.text))),
            *(escape(first_line(other.text)), mark(question.accepts(other.text))),
        )
    return table


def size(count: int) -> str:
    """Decimal bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def metrics_table(counters: dict[str, int], context_pages: int) -> Table:
    """What the sparse server counted while it answered."""

    def share(name: str) -> str:
        part = counters[name] / counters["sparse_pages_selected"] if counters["sparse_pages_selected"] else 0.0
        return f"{part:.1%} of the pages attended"

    attended = counters["sparse_pages_selected"] / context_pages if context_pages else 0.0
    table = Table(title="/metrics of the sparse server (a page: 16 tokens of one KV head of one layer)", title_justify="left")
    for name, justify in (("series sglang:", "left"), ("value", "right"), ("", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    for name, note in (
        ("sparse_pages_selected", f"{attended:.1%} of the {context_pages:,} context pages that dense reads"),
        ("sparse_page_hits", share("sparse_page_hits")),
        ("sparse_page_misses", share("sparse_page_misses") + ", fetched from home"),
        ("sparse_pages_born", "begun by a new token"),
    ):
        table.add_row(name, f"{counters[name]:,}", note)
    for name, note in (("demand", "home to device, misses"), ("prefix", "home to device, prefix of prefills"), ("write", "device to home")):
        table.add_row(f"sparse_link_bytes_{name}", size(counters[f"sparse_link_bytes_{name}"]), note)
    for kind, note in (("frames", "device slots for pages; idle now"), ("home_tokens", "the document stays cached")):
        used, free = counters[f"sparse_{kind}_used"], counters[f"sparse_{kind}_free"]
        table.add_row(f"sparse_{kind}_used", f"{used:,}", f"of {used + free:,}: {note}")
    return table
