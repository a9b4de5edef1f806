"""Checks a run beyond its form: what its files say about each other, and the arithmetic of ``traces.schema``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.layout import META, REQUESTS, SELECTIONS, STEPS
from traces.load import load_meta, load_requests, load_steps
from traces.problems import Problem, TraceError
from traces.reader import SelectionEvent, iterate_selections
from traces.schema import DECODE, RequestRecord, RunMeta, StepRecord

TOTALS = {
    "sparse_pages_selected": "selected",
    "sparse_page_hits": "hits",
    "sparse_page_misses": "misses",
    "sparse_pages_born": "born",
    "sparse_link_bytes_demand": "demand_bytes",
    "sparse_link_bytes_prefix": "prefix_bytes",
    "sparse_link_bytes_write": "write_bytes",
}
"""Counters of ``meta.totals`` and the column of the steps that they sum, over all layers."""


def validate_run(path: str | os.PathLike[str]) -> list[Problem]:
    """All findings in the run at ``path``; an empty list means that it is whole and consistent. Raises nothing for a damaged run.

    An unfinished run is one finding, and is checked as far as it goes, without sums. Cross checks run only if every record is whole.
    """
    directory = Path(path)
    problems: list[Problem] = []
    try:
        meta = load_meta(directory)
    except TraceError as error:
        return [error.problem]
    if not meta.complete:
        problems.append(Problem(META, None, "complete", "expected true, found false: the run was not closed"))
    requests = load_requests(directory, meta, problems.append)
    known = {request.id for request in requests} if meta.complete else None
    steps = load_steps(directory, meta, known, problems.append)
    # With records left out, what does not add up is a consequence of what was reported.
    whole = len(problems) == (0 if meta.complete else 1)
    problems += check_meta(meta)
    for step in steps:
        problems += check_step(step, meta)
    attended = _Attended(meta, steps)
    damage: list[Problem] = []
    for event, _ in iterate_selections(directory, meta, known, damage.append):
        problems += attended.add(event) if whole else ()
    problems += damage
    if whole and meta.complete:
        problems += check_totals(steps, meta)
        problems += check_requests(requests, steps, meta)
        problems += () if damage else attended.check_counts()
    return problems


def check_meta(meta: RunMeta) -> Iterator[Problem]:
    """Fields of the head that contradict each other."""
    beyond = [layer for layer in meta.sparse.dense_layers if not 0 <= layer < meta.model.layers]
    if beyond:
        yield Problem(META, None, "sparse.dense_layers", f"expected layers in 0..{meta.model.layers - 1}, found {beyond}")
    if meta.model.query_heads % meta.model.kv_heads:
        yield Problem(
            META, None, "model.query_heads", f"expected a multiple of kv_heads(={meta.model.kv_heads}), found {meta.model.query_heads}"
        )


def _step(step: StepRecord, field: str, message: str) -> Problem:
    return Problem(STEPS, None, field, f"step {step.step}: {message}")


def check_step(step: StepRecord, meta: RunMeta) -> Iterator[Problem]:
    """Counts and bytes of one step against the formulas of the format."""
    model, server = meta.model, meta.server
    if len(set(step.requests)) < len(step.requests):
        yield _step(step, "requests", f"expected distinct requests, found {step.requests}")
    if not step.requests:
        yield _step(step, "requests", "expected at least one request")
    mode = "decode" if all(step.decoding) else "mixed" if any(step.decoding) else "prefill"
    if mode != step.mode:
        yield _step(step, "mode", f"expected {mode} (from decoding), found {step.mode}")
    for request, new, decoding in zip(step.requests, step.new_tokens, step.decoding):
        if new < 1 or (decoding and new != 1):
            yield _step(step, "new_tokens", f"expected {'1 token' if decoding else 'at least 1 token'} of request {request}, found {new}")
    pages = sum(
        -(-prefix // server.page_size) for prefix, decoding in zip(step.prefix_tokens, step.decoding) if not decoding
    )  # an empty prefix has no pages
    prefix_bytes = pages * model.kv_heads * meta.head_page_bytes
    write_bytes = sum(step.new_tokens) * model.kv_heads * 2 * model.head_dim * model.kv_itemsize
    for layer in range(model.layers):
        counts = step.hits[layer] + step.misses[layer] + step.born[layer]
        for field, expected, why in (
            ("selected", counts, "hits + misses + born"),
            ("demand_bytes", step.misses[layer] * meta.head_page_bytes, "misses x bytes of a head page"),
            ("prefix_bytes", prefix_bytes, "prefix pages x KV heads x bytes of a head page"),
            ("write_bytes", write_bytes, "new tokens x KV heads x bytes of a token's K and V"),
        ):
            found = getattr(step, field)[layer]
            if found != expected:
                yield _step(step, f"{field}.{layer}", f"expected {expected} ({why}), found {found}")
                break
    if step.frames_used > server.device_frames:
        yield _step(step, "frames_used", f"expected at most {server.device_frames} (server.device_frames), found {step.frames_used}")
    if step.home_used > server.home_tokens:
        yield _step(step, "home_used", f"expected at most {server.home_tokens} (server.home_tokens), found {step.home_used}")


class _Attended:
    """Holds selection events against the steps: each names a request of its step, and the pages add up to the step's counts."""

    def __init__(self, meta: RunMeta, steps: Sequence[StepRecord]) -> None:
        self.meta, self.steps = meta, steps
        self._by_number = {step.step: step for step in steps}
        self._pages: dict[int, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(meta.model.layers, np.int64))

    def add(self, event: SelectionEvent) -> Iterator[Problem]:
        """Count ``event`` and yield what it contradicts."""
        if event.kind == DECODE:
            self._pages[event.step] += (event.pages >= 0).sum(axis=(1, 2))
        step = self._by_number.get(event.step)
        where = f"step {event.step}, request {event.request}"
        if step is None:
            # The parts of an unfinished run may end with selections of a step that was never recorded.
            if self.meta.complete:
                yield Problem(SELECTIONS, None, "step", f"{where}: expected a step of {STEPS}, found none with this number")
            return
        if event.request not in step.requests:
            yield Problem(SELECTIONS, None, "request", f"{where}: expected a request of the step {step.requests}")
            return
        at = step.requests.index(event.request)
        if step.decoding[at] != (event.kind == DECODE):
            yield Problem(SELECTIONS, None, "kind", f"{where}: expected {int(step.decoding[at])} (from decoding of the step), found {event.kind}")
        context = step.prefix_tokens[at] + step.new_tokens[at]
        if event.context != context:
            yield Problem(SELECTIONS, None, "context", f"{where}: expected {context} (prefix + new tokens of the step), found {event.context}")

    def check_counts(self) -> Iterator[Problem]:
        """Steps whose ``selected`` is not the number of pages in their selections."""
        for step in self.steps:
            pages = self._pages[step.step]
            wrong = np.flatnonzero(pages != np.asarray(step.selected))
            if wrong.size:
                layer = int(wrong[0])
                yield _step(step, f"selected.{layer}", f"expected {pages[layer]} (pages in {SELECTIONS}), found {step.selected[layer]}")


def check_totals(steps: Sequence[StepRecord], meta: RunMeta) -> Iterator[Problem]:
    """Counters of the head that are not the sums over the steps; counters that are absent are not checked."""
    for name, column in TOTALS.items():
        found = meta.totals.get(name)
        expected = sum(sum(getattr(step, column)) for step in steps)
        if found is not None and found != expected:
            yield Problem(META, None, f"totals.{name}", f"expected {expected} (the sum of {column} over the steps), found {found}")


class _Progress:
    """What the steps say about one request."""

    def __init__(self) -> None:
        self.first_prefix: int | None = None
        self.reached = 0
        self.prefilled = 0
        self.decoded = 0
        self.gap: str | None = None

    def add(self, step: StepRecord, at: int) -> None:
        prefix, new = step.prefix_tokens[at], step.new_tokens[at]
        if self.first_prefix is None:
            self.first_prefix = prefix
        elif prefix != self.reached and self.gap is None:
            self.gap = f"step {step.step}: expected a prefix of {self.reached} tokens (what the steps before reached), found {prefix}"
        self.reached = prefix + new
        if step.decoding[at]:
            self.decoded += 1
        else:
            self.prefilled += new


def check_requests(requests: Sequence[RequestRecord], steps: Sequence[StepRecord], meta: RunMeta) -> Iterator[Problem]:
    """Lengths of each request against its steps. A retracted request prefills anew, so that only its tokens handed on are counted."""
    progress: dict[int, _Progress] = defaultdict(_Progress)
    for step in steps:
        for at, request in enumerate(step.requests):
            progress[request].add(step, at)
    for record in requests:
        done = progress[record.id]
        for field, message in _check_progress(record, done, meta):
            yield Problem(REQUESTS, None, field, f"request {record.id}: {message}")


def _check_progress(record: RequestRecord, done: _Progress, meta: RunMeta) -> Iterator[tuple[str, str]]:
    tokens = record.prompt_tokens + record.output_tokens
    if record.cached_tokens > record.prompt_tokens:
        yield "cached_tokens", f"expected at most prompt_tokens(={record.prompt_tokens}), found {record.cached_tokens}"
    if record.output_tokens > max(record.max_new_tokens, 1):  # a prefill always hands on one
        yield "output_tokens", f"expected at most max_new_tokens(={record.max_new_tokens}), found {record.output_tokens}"
    if len(record.page_hashes) > tokens // meta.server.page_size:
        yield "page_hashes", f"expected at most {tokens // meta.server.page_size} (full pages of {tokens} tokens), found {len(record.page_hashes)}"
    if record.status == "refused" and done.first_prefix is not None:
        yield "status", "refused, but it is in the steps"
    if record.status != "finished":
        return
    if record.retractions == 0:
        if done.first_prefix != record.cached_tokens:
            yield "cached_tokens", f"expected {done.first_prefix} (prefix of its first step), found {record.cached_tokens}"
        if done.gap is not None:
            yield "prompt_tokens", done.gap
        if (done.first_prefix or 0) + done.prefilled != record.prompt_tokens:
            yield "prompt_tokens", f"expected {(done.first_prefix or 0) + done.prefilled} (cached + prefilled in the steps), found {record.prompt_tokens}"
    # Every prefill hands on one token, every decode step one; the overlap scheduler runs a step too many before it sees the end.
    most = done.decoded + 1 + record.retractions
    least = most - (1 + record.retractions if meta.server.overlap else 0)
    if not least <= record.output_tokens <= most:
        expected = f"{least}..{most}" if least < most else f"{most}"
        yield "output_tokens", f"expected {expected} (from {done.decoded} decode steps), found {record.output_tokens}"
