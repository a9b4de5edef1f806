"""Who may enter the running batch, by the frames of the device tier. Home is counted by SGLang's own allocator."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_ext.policy.buffers import FixedBuffers, RowPlan


class AdmissionError(ValueError):
    """A request that can never be served with this configuration; the message holds the arithmetic."""


class FrameLedger:
    """Reserves frames for requests, first come first served.

    A request is admitted only if the frames of its mandatory and minimum buffering pages are free (SPIN section 5.3). Frames are
    reserved at admission and given back when the request ends or is retracted.

    Args:
        total: frames of the device tier.
        buffers: how many frames a request's rows own.
    """

    def __init__(self, total: int, buffers: FixedBuffers) -> None:
        self.total = total
        self.buffers = buffers
        self.reserved: dict[Hashable, RowPlan] = {}
        self.used = 0
        self.refusals = 0

    @property
    def free(self) -> int:
        """Frames not reserved."""
        return self.total - self.used

    def check_possible(self, max_tokens: int) -> None:
        """Raise :class:`AdmissionError` if a request that grows to ``max_tokens`` tokens could not be served even alone."""
        plan = self.buffers.plan(max_tokens)
        if plan.frames > self.total:
            per_row = max(plan.capacity)
            raise AdmissionError(
                f"a request of up to {max_tokens} tokens needs {plan.frames} device frames ({len(plan.capacity)} layers x {plan.kv_heads} KV heads, "
                f"up to {per_row} pages a row), the device tier has {self.total}. Raise --sparse-device-memory, or lower --sparse-buffer-factor, "
                f"--sparse-budget, --sparse-dense-layers or the request's max_new_tokens"
            )

    def admit(self, key: Hashable, max_tokens: int) -> RowPlan | None:
        """Reserve frames for request ``key``; ``None`` when they are not free now (the request waits). Idempotent for a known key."""
        known = self.reserved.get(key)
        if known is not None:
            return known
        plan = self.buffers.plan(max_tokens)
        if plan.frames > self.free:
            self.refusals += 1
            return None
        self.reserved[key] = plan
        self.used += plan.frames
        return plan

    def release(self, key: Hashable) -> None:
        """Give back what ``key`` holds; a key that holds nothing is ignored (a request may end before it was admitted)."""
        plan = self.reserved.pop(key, None)
        if plan is not None:
            self.used -= plan.frames

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless reserved + free = total."""
        used = sum(plan.frames for plan in self.reserved.values())
        if used != self.used or not 0 <= used <= self.total:
            raise RuntimeError(f"frame ledger: sum of reservations {used} != used {self.used} (total {self.total})")
