"""The trace format: what a run was asked, what each step cost, and which pages each step attended. No text, no token ids.

A run is a directory (DESIGN section 7)::

    meta.json            schema version, model shape, hardware, versions, configuration, seed, totals
    requests.jsonl       one line a request: arrival, lengths, page hashes, timestamps
    steps.parquet        one row a scheduler step: mode, batch, token counts, measured phase times, hits and link bytes by layer
    selections.parquet   one row a (request, step): pages that each (layer, KV head) attends, delta-coded

Times are integer nanoseconds since the start of the run.
"""

SCHEMA_VERSION = 1
