"""How much of the waiting queue one prefill batch may take: SGLang's ``PrefillAdder`` in numbers, without its tensors."""

from __future__ import annotations

from enum import Enum, auto

CLIP_NEW_TOKENS = 4096
"""SGLang clips a request's ``max_new_tokens`` to this when it estimates home."""


class Verdict(Enum):
    """What trying one request said: go on with the next, home or frames are short, or the batch is full for another reason."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class TokenRatio:
    """Share of its ``max_new_tokens`` that a running request is expected to need; decays by decode step, set anew by a retraction."""

    INIT = 0.7
    MIN = 0.7 * 0.14
    DECAY = (INIT - MIN) / 600
    RETRACT_STEPS = 20

    def __init__(self) -> None:
        self.current = self.INIT

    def decay(self) -> None:
        """One decode step without a retraction."""
        self.current = max(self.current - self.DECAY, self.MIN)

    def retracted(self, decoded: int, max_new: int, requests: int) -> None:
        """After a retraction left ``requests`` running, with ``decoded`` tokens of at most ``max_new``."""
        self.current = min(1.0, (decoded + self.RETRACT_STEPS * requests) / (max_new + 1))

    def reset(self) -> None:
        """The scheduler went idle."""
        self.current = self.INIT


class PrefillBudget:
    """Counters of one prefill batch, in tokens.

    Args:
        page_size: tokens a page.
        max_tokens: tokens of all prefills of a batch (``max_prefill_tokens``).
        chunk_tokens: tokens of a chunked batch, ``None`` without chunked prefill.
        mixed_tokens: decode tokens that will join the batch.
        running_tokens: tokens that the running requests are expected to need.
    """

    def __init__(self, page_size: int, max_tokens: int, chunk_tokens: int | None, mixed_tokens: int, running_tokens: float) -> None:
        self.page_size = page_size
        self.input = max_tokens - mixed_tokens
        self.chunk = None if chunk_tokens is None else chunk_tokens - mixed_tokens
        self.total_offset = mixed_tokens + running_tokens
        self.now_offset = float(mixed_tokens)

    def ceil(self, tokens: int) -> int:
        """Whole pages of ``tokens``, in tokens."""
        return -(-tokens // self.page_size) * self.page_size

    def remaining(self, available: int) -> float:
        """Tokens of home left, of ``available`` free and evictable ones, after what is promised."""
        return available - self.total_offset

    def continued(self, missing: int, available: int) -> int:
        """Tokens that the chunked request of the last batch gets now; it always gets some."""
        assert self.chunk is not None
        allowed = min(self.chunk, int(self.remaining(available)))
        return min(missing, allowed if allowed > 0 else self.chunk)

    def fresh(self, missing: int, prefix: int, first: bool) -> int:
        """Tokens that a new request with ``missing`` tokens after ``prefix`` gets now; 0 if it must wait for the next batch."""
        padded = self.ceil(missing)
        if self.chunk is None:
            return missing if first or padded < self.input else 0
        if padded <= self.chunk:
            return missing
        end = (prefix + self.chunk // self.page_size * self.page_size) // self.page_size * self.page_size
        return max(0, end - prefix)

    def take(self, tokens: int, max_new: int) -> None:
        """Account for ``tokens`` of a request that will write ``max_new`` more."""
        padded = self.ceil(tokens)
        self.total_offset += padded + max_new + self.page_size
        self.now_offset += padded + self.page_size
        self.input -= padded
        if self.chunk is not None:
            self.chunk -= padded

    def verdict(self, available: int) -> Verdict:
        """Whether another request may be tried."""
        if available - self.total_offset <= 0 or available - self.now_offset <= 0:
            return Verdict.NO_TOKEN
        if self.input <= 0 or (self.chunk is not None and self.chunk <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE
