"""Our series on SGLang's own ``/metrics``: counters and gauges of the scheduler process."""

from __future__ import annotations

from typing import Any

from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

from sglang_ext.runtime import get_runtime

COUNTERS = {
    "sparse_pages_selected": "pages attended by decoding rows (one a page, KV head and layer)",
    "sparse_page_hits": "selected pages that had a frame",
    "sparse_page_misses": "selected pages that crossed the link from home",
    "sparse_pages_born": "pages begun by a new token, written in place",
    "sparse_link_bytes_demand": "bytes home to device for misses",
    "sparse_link_bytes_prefix": "bytes home to device for the prefix of prefill chunks",
    "sparse_link_bytes_write": "bytes device to home, write-through of new tokens",
    "sparse_admission_waits": "times that a waiting request found no free frames",
    "sparse_refused_requests": "requests refused because they can never fit",
}
GAUGES = {
    "sparse_frames_used": "frames owned by rows",
    "sparse_frames_free": "frames nobody owns",
    "sparse_home_tokens_used": "token slots of home in use or cached",
    "sparse_home_tokens_free": "token slots of home that are free",
}


class SparseMetricsCollector(SchedulerMetricsCollector):  # type: ignore[misc]
    """SGLang's collector and ours."""

    def __init__(self, labels: dict[str, str], **kwargs: Any) -> None:
        super().__init__(labels, **kwargs)
        # Not at import: prometheus_client looks for its multi-process directory then, which SGLang sets later.
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._sparse_counters = {name: Counter(f"sglang:{name}", text, names) for name, text in COUNTERS.items()}
        self._sparse_gauges = {name: Gauge(f"sglang:{name}", text, names, multiprocess_mode="mostrecent") for name, text in GAUGES.items()}
        self._sparse_seen = dict.fromkeys(COUNTERS, 0)

    def log_stats(self, stats: Any) -> None:
        """SGLang calls it at prefills and every ``--decode-log-interval`` steps."""
        super().log_stats(stats)
        self.log_sparse()

    def log_sparse(self) -> None:
        """Bring our series up to date."""
        runtime = get_runtime()
        if runtime is None:
            return
        for name, value in runtime.counters().items():
            self._sparse_counters[name].labels(**self.labels).inc(value - self._sparse_seen[name])
            self._sparse_seen[name] = value
        used = runtime.home_tokens_used()
        for name, value in {
            "sparse_frames_used": runtime.device.used,
            "sparse_frames_free": runtime.device.pool.free,
            "sparse_home_tokens_used": used,
            "sparse_home_tokens_free": runtime.pool.size - used,
        }.items():
            self._sparse_gauges[name].labels(**self.labels).set(value)
