"""SGLang's scheduler, modelled from the arrivals: which batch comes next.

The rules are those of SGLang 0.5.17 for one rank and FCFS. Three of its details shape the timeline and are kept: a request that ended
stays in the running batch until the next decode step filters it (and with overlap decodes one step too many); ``full`` stops prefills
until a filter has made room; a prefill batch joins the running batch one iteration later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_ext.policy import AdmissionError, FrameLedger
from simulator.admission import CLIP_NEW_TOKENS, PrefillBudget, TokenRatio, Verdict
from simulator.home import Holding, Home
from simulator.pagecache import buffers_of
from simulator.schedule import Token
from simulator.workload import Batch, Row
from traces.schema import RequestRecord, RunMeta

POLICIES = ("fcfs",)
"""Scheduling policies that the model knows."""


@dataclass(eq=False, slots=True)
class _Live:
    """A request in the scheduler. ``computed`` tokens were launched, ``tokens`` handed on."""

    record: RequestRecord
    holding: Holding
    computed: int = 0
    tokens: int = 0
    ended: bool = False
    epoch: int = 0

    @property
    def target(self) -> int:
        """Tokens that its prefill covers: the prompt, and what it wrote before it was retracted."""
        return self.record.prompt_tokens + self.tokens

    @property
    def max_tokens(self) -> int:
        return self.record.prompt_tokens + self.record.max_new_tokens

    @property
    def new_left(self) -> int:
        return min(max(self.record.max_new_tokens - self.tokens, 0), CLIP_NEW_TOKENS)


@dataclass(slots=True)
class _Launch:
    """The batch that was launched last, as the next iteration sees it."""

    prefill: list[_Live] = field(default_factory=list)
    decode: list[_Live] = field(default_factory=list)
    chunked: _Live | None = None


class ModelledSchedule:
    """Implements :class:`simulator.schedule.Schedule`.

    Raises:
        ValueError: if the run was scheduled by another policy than FCFS.
    """

    def __init__(self, meta: RunMeta) -> None:
        server = meta.server
        if server.schedule_policy not in POLICIES:
            raise ValueError(
                f"the scheduler model knows schedule_policy 'fcfs', the run used {server.schedule_policy!r}: replay it with --schedule recorded"
            )
        self.server = server
        self.page = server.page_size
        self.chunk = server.chunked_prefill_size if server.chunked_prefill_size > 0 else None
        self.home = Home(server.home_tokens // self.page, server.radix_cache)
        self.ledger = FrameLedger(server.device_frames, buffers_of(meta))
        self.ratio = TokenRatio()
        self.refused = 0
        self.retractions = 0
        self.waiting: deque[_Live] = deque()
        self.running: list[_Live] = []
        self.chunked: _Live | None = None
        self.full = False
        self._last = _Launch()
        self._live: dict[int, _Live] = {}

    def arrive(self, request: RequestRecord) -> None:
        """See ``Schedule``. A request that can never fit is refused."""
        pages = -(-(request.prompt_tokens + request.max_new_tokens) // self.page) + 1
        try:
            self.ledger.check_possible(request.prompt_tokens + request.max_new_tokens)
        except AdmissionError:
            self.refused += 1
            return
        if pages > self.home.pages:
            self.refused += 1
            return
        live = _Live(request, Holding(request.page_hashes))
        self._live[request.id] = live
        self.waiting.append(live)

    def open_requests(self) -> int:
        """See ``Schedule``."""
        return len(self._live)

    # One iteration of the scheduler ------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """See ``Schedule``."""
        self._merge_last()
        filtered = bool(self.running)
        batch = self._prefill() or self._decode()
        if batch is None and filtered:
            batch = self._prefill()  # the filter made room: SGLang's loop finds it an (empty) iteration later
        if batch is None:
            self._last = _Launch()
            if not self._live:
                self.ratio.reset()
        return batch

    def _merge_last(self) -> None:
        """The last batch's prefills join the running batch; the request that is still being chunked enters the tree."""
        last = self._last
        if self.chunked is not None:
            self.home.insert(self.chunked.holding, self._full_pages(self.chunked, self.chunked.computed))
        if last.prefill:
            joined = [live for live in (*last.prefill, *last.decode) if live is not last.chunked and not live.ended]
            if len(joined) < len(last.prefill) + len(last.decode):
                self.full = False
            if joined and not self.running:
                self.full = False
            self.running.extend(joined)
        self._last = _Launch()

    def _prefill(self) -> Batch | None:
        if (self.full or not self.waiting) and self.chunked is None:
            return None
        slots = self._slots()
        if slots <= 0 and self.chunked is None:
            self.full = True
            return None
        mixed = self.server.mixed_chunk and self.chunk is not None
        expected = sum(live.new_left for live in self.running) * self.ratio.current
        budget = PrefillBudget(self.page, self.server.max_prefill_tokens, self.chunk, len(self.running) if mixed else 0, expected)
        taken: list[tuple[_Live, int, int]] = []
        chunked = None
        if self.chunked is not None:
            live = self.chunked
            missing = live.target - live.computed
            tokens = budget.continued(missing, self._available())
            budget.take(tokens, live.new_left if tokens == missing else 0)
            taken.append((live, live.computed, tokens))
            chunked = live if tokens < missing else None
        while self.waiting:
            if len(taken) >= slots:
                self.full = True
            if self.full:
                break
            live = self.waiting[0]
            tokens, verdict = self._admit(live, budget, first=not taken)
            if tokens:
                self.waiting.popleft()
                taken.append((live, live.computed, tokens))
                chunked = live if live.computed + tokens < live.target else chunked
            if verdict is Verdict.NO_TOKEN:
                self.full = True
            if verdict is not Verdict.CONTINUE:
                break
        if not taken:
            return None
        self.chunked = chunked
        return self._launch_prefill(taken, mixed)

    def _admit(self, live: _Live, budget: PrefillBudget, first: bool) -> tuple[int, Verdict]:
        """Tokens that ``live`` gets in this batch (0: none), and whether to try the next. Locks its prefix and its frames."""
        matched = self.home.match(live.holding.hashes, (live.target - 1) // self.page)
        missing = live.target - matched * self.page
        needed = missing + live.new_left + self.page
        if needed >= budget.remaining(self._available()):
            return 0, Verdict.NO_TOKEN
        self.home.lock(live.holding, matched)
        if needed >= budget.remaining(self._available()):
            self.home.unlock(live.holding)
            return 0, Verdict.NO_TOKEN
        tokens = budget.fresh(missing, matched * self.page, first)
        verdict = Verdict.OTHER
        if tokens and self.ledger.admit(live.record.id, live.max_tokens) is None:
            tokens, verdict = 0, Verdict.NO_TOKEN
        if not tokens:
            self.home.unlock(live.holding)
            return 0, verdict
        live.computed = matched * self.page
        budget.take(tokens, min(live.record.max_new_tokens, CLIP_NEW_TOKENS) if tokens == missing else 0)
        return tokens, budget.verdict(self._available())

    def _launch_prefill(self, taken: list[tuple[_Live, int, int]], mixed: bool) -> Batch:
        rows = []
        for live, prefix, tokens in taken:
            self._extend(live, tokens)
            rows.append(Row(live.record.id, prefix, tokens, False, live.computed == live.target, live.epoch))
        decode: list[_Live] = []
        if mixed and self.running:
            decode = [live for live in self.running if not live.ended]
            self.running = []
            rows.extend(self._decode_row(live) for live in decode)
        self._last = _Launch([live for live, _, _ in taken], decode, self.chunked)
        return self._batch(rows)

    def _decode(self) -> Batch | None:
        if not self.running:
            return None
        before = len(self.running)
        self.running = [live for live in self.running if not live.ended]
        if self.running:
            self._make_room()
        if len(self.running) < before:
            self.full = False
        if not self.running:
            return None
        return self._batch([self._decode_row(live) for live in self.running])

    def _make_room(self) -> None:
        """Retract requests, fewest written tokens first, until home has a page for each that begins one."""
        if self._fits():
            self.ratio.decay()
            return
        keep = sorted(self.running, key=lambda live: (live.tokens, -live.record.prompt_tokens), reverse=True)
        while len(keep) > 1:
            self._retract(keep.pop())
            if self._fits(keep):
                break
        if not self._fits(keep):
            raise RuntimeError(f"home of {self.home.pages} pages can't hold request {keep[0].record.id} alone")
        kept = set(map(id, keep))
        self.running = [live for live in self.running if id(live) in kept]
        self.ratio.retracted(sum(live.tokens for live in keep), sum(live.record.max_new_tokens for live in keep), len(keep))

    def _fits(self, requests: list[_Live] | None = None) -> bool:
        pages = sum(live.computed % self.page == 0 for live in (self.running if requests is None else requests))
        return pages <= self.home.free + self.home.evictable

    def _retract(self, live: _Live) -> None:
        self._release(live)
        live.computed = 0
        live.epoch += 1
        self.retractions += 1
        self.waiting.append(live)

    # Results -----------------------------------------------------------------------------------------------------------------

    def deliver(self, batch: Batch) -> list[Token]:
        """See ``Schedule``."""
        tokens = []
        for row in batch.rows:
            live = self._live.get(row.request)
            if live is None or not row.yields or live.epoch != row.epoch:
                continue
            live.tokens += 1
            last = live.tokens >= live.record.output_tokens  # SGLang runs one token of a refused request, to answer it
            tokens.append(Token(row.request, live.tokens, last))
            if last:
                live.ended = True
                self.home.insert(live.holding, self._full_pages(live, live.record.prompt_tokens + live.tokens - 1))
                self._release(live)
                del self._live[row.request]
            elif not row.decoding:
                self.home.insert(live.holding, self._full_pages(live, row.context))
        return tokens

    # Books -------------------------------------------------------------------------------------------------------------------

    def _available(self) -> int:
        return (self.home.free + self.home.evictable) * self.page

    def _slots(self) -> int:
        """Requests that may still start: ended ones count until a decode step filters them."""
        holding = sum(not live.ended for live in self.running) + (self.chunked is not None)
        return self.server.max_running_requests - max(len(self.running), holding)

    def _full_pages(self, live: _Live, tokens: int) -> int:
        return min(tokens // self.page, len(live.holding.hashes))

    def _extend(self, live: _Live, tokens: int) -> None:
        held = live.holding.locked + live.holding.private
        live.computed += tokens
        self.home.allocate(live.holding, max(0, -(-live.computed // self.page) - held))

    def _decode_row(self, live: _Live) -> Row:
        self._extend(live, 1)
        return Row(live.record.id, live.computed - 1, 1, True, True, live.epoch)

    def _release(self, live: _Live) -> None:
        self.home.release(live.holding)
        self.ledger.release(live.record.id)

    def _batch(self, rows: list[Row]) -> Batch:
        return Batch(tuple(rows), len(self.running), len(self.waiting), -1, self.ledger.used, self.home.used * self.page)

    def check(self) -> None:
        """Raise ``RuntimeError`` unless both tiers balance and nothing is left behind."""
        self.home.check_integrity()
        self.ledger.check_integrity()
        if not self._live and (self.ledger.used or self.home.private or self.home.evictable + self.home.free != self.home.pages):
            raise RuntimeError(f"all requests ended, {self.ledger.used} frames and {self.home.private} pages are still held")
