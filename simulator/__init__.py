"""Replays a recorded run through the policies that served it, in SimPy: cache, costs, scheduler, link.

Layers, each usable without the next (DESIGN section 8)::

    workload    the run as batches and requests           pagecache   hits and misses through `sglang_ext.policy`
    work        what a batch asks of GPU and link         cost        nanoseconds of a step, fitted from the run
    home        logical tokens and the radix tree         scheduler   which batch comes next
    engine      SimPy: the only user of an environment    metrics, compare, report, chrome, cli

Imports neither torch nor sglang.
"""
