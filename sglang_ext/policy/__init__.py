"""Decisions only: which pages a row may attend, which it keeps, which request is admitted.

Numpy, no torch, no sglang: the class that serves is the class that is simulated.
"""

from sglang_ext.policy.admission import AdmissionError, FrameLedger
from sglang_ext.policy.budget import PageBudget, PageSpan
from sglang_ext.policy.buffers import FixedBuffers, RowPlan
from sglang_ext.policy.eviction import Access, BucketedLRU, FlatPageTable, PageTable

__all__ = [
    "Access",
    "AdmissionError",
    "BucketedLRU",
    "FixedBuffers",
    "FlatPageTable",
    "FrameLedger",
    "PageBudget",
    "PageSpan",
    "PageTable",
    "RowPlan",
]
