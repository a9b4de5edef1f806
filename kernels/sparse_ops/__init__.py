"""Operators of the sparse serving path, one file each: the plain PyTorch reference and the form that serves, chosen once at start.

Shapes: B requests, H KV heads, G query heads a KV head, D head dim, P tokens a page, S selected pages, T tokens. A row is one
(request, KV head); its query heads are ``q.view(B, H, G, D)[b, h]``.
"""

from sparse_ops.attention import attend_dense, attend_dense_reference, attend_frames, attend_frames_reference
from sparse_ops.copies import append_token, gather_pages, gather_prefix, store_tokens
from sparse_ops.merge import merge_partials
from sparse_ops.scores import mean_scores, page_mass, quest_bounds
from sparse_ops.summaries import update_minmax_chunk, update_minmax_token
from sparse_ops.topk import select_pages, select_pages_reference

__all__ = [
    "append_token",
    "attend_dense",
    "attend_dense_reference",
    "attend_frames",
    "attend_frames_reference",
    "gather_pages",
    "gather_prefix",
    "mean_scores",
    "merge_partials",
    "page_mass",
    "quest_bounds",
    "select_pages",
    "select_pages_reference",
    "store_tokens",
    "update_minmax_chunk",
    "update_minmax_token",
]
