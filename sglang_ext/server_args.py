"""SGLang's server arguments with ours: the same flags for ``launch_server``, ``sglang serve`` and ``sglang.Engine``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Optional

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_ext.algorithms import check_algorithm
from sglang_ext.config import SparseConfig, load_config
from sglang_ext.policy import PageBudget
from sglang_ext.refusals import check_server_args

FLAGS = ("algorithm", "budget", "sink", "window", "dense_layers", "host_memory", "device_memory", "buffer_factor", "trace")
"""Fields of :class:`SparseConfig` that have a flag ``--sparse-<name>``."""

DEFAULT_PAGE_SIZE = 16
DEFAULT_MAX_RUNNING = 64


def _help(field: str) -> str:
    return str(SparseConfig.model_fields[field].description)


@dataclasses.dataclass
class SparseServerArgs(ServerArgs):  # type: ignore[misc]
    """A run is sparse when any ``--sparse-*`` flag or ``--attention-backend sparse`` is given; else nothing changes."""

    # Optional[...], not "| None": SGLang derives the flags from these annotations. Values stay text until the config reads them, so
    # that flags and file are checked by one piece of code.
    sparse_config: A[Optional[str], Arg(help="YAML file with a sparse configuration; flags win over it")] = None  # noqa: UP045
    sparse_algorithm: A[Optional[str], Arg(help=_help("algorithm"))] = None  # noqa: UP045
    sparse_budget: A[Optional[str], Arg(help=_help("budget"))] = None  # noqa: UP045
    sparse_sink: A[Optional[str], Arg(help=_help("sink"))] = None  # noqa: UP045
    sparse_window: A[Optional[str], Arg(help=_help("window"))] = None  # noqa: UP045
    sparse_dense_layers: A[Optional[str], Arg(help=_help("dense_layers"))] = None  # noqa: UP045
    sparse_host_memory: A[Optional[str], Arg(help=_help("host_memory"))] = None  # noqa: UP045
    sparse_device_memory: A[Optional[str], Arg(help=_help("device_memory"))] = None  # noqa: UP045
    sparse_buffer_factor: A[Optional[str], Arg(help=_help("buffer_factor"))] = None  # noqa: UP045
    sparse_trace: A[Optional[str], Arg(help=_help("trace"))] = None  # noqa: UP045

    def __post_init__(self) -> None:
        args: Any = self  # the stock class is not typed for us
        given = {name: getattr(self, f"sparse_{name}") for name in FLAGS}
        given = {name: value for name, value in given.items() if value is not None}
        self.sparse_active = bool(given) or self.sparse_config is not None or args.attention_backend == "sparse"
        self.sparse_resolved: SparseConfig | None = None
        if not self.sparse_active:
            if args.radix_cache_backend == "sparse":
                raise ValueError("--radix-cache-backend sparse needs --attention-backend sparse or a --sparse-* flag")
            super().__post_init__()
            return
        config = load_config(self.sparse_config, given)
        check_algorithm(config.algorithm)
        if config.trace is not None:
            check_trace_directory(config.trace)
        args.page_size = args.page_size if args.page_size is not None else DEFAULT_PAGE_SIZE
        check_server_args(self)
        PageBudget(args.page_size, config.budget, config.sink, config.window)  # refuses a budget that is too small for this page size
        self.sparse_resolved = config
        args.attention_backend = "sparse"
        args.radix_cache_backend = "sparse"
        self.disable_prefill_cuda_graph = True
        if args.max_running_requests is None:
            # SGLang's default grows with home's logical capacity to thousands of request slots, each with tables of ours.
            args.max_running_requests = DEFAULT_MAX_RUNNING
        if self.enable_metrics:
            from sglang_ext.metrics import SparseMetricsCollector

            args.stat_loggers = {**(args.stat_loggers or {}), "scheduler": SparseMetricsCollector}
        super().__post_init__()


def check_trace_directory(directory: str) -> None:
    """Raise ``ValueError`` if a run can't be recorded into ``directory``, before the model loads."""
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--sparse-trace {directory} is not a directory")
    if (path / "meta.json").exists():
        raise ValueError(f"--sparse-trace {directory} holds a recorded run already: give a new directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--sparse-trace {directory} can't be made: {error.strerror}") from None
