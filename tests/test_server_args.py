"""The server's arguments through the command line, as ``launch_server`` reads them after it loaded the plug-ins.

SGLang keeps what it resolves in globals and in the environment, so all of it happens in one process beside the tests'.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

Parse = Callable[..., dict[str, Any]]

SHOWN = ("attention_backend", "radix_cache_backend", "page_size", "max_running_requests", "disable_prefill_cuda_graph", "stat_loggers", "sparse_active", "device")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def _load() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def _parse(argv: list[str], stock: bool) -> dict[str, Any]:
    """What ``argv`` becomes: the fields shown, the configuration, and the same after pickling. Runs in the other process."""
    from sglang.srt.server_args import prepare_server_args

    if stock:
        import sglang.srt.server_args as module

        from sglang_ext.server_args import SparseServerArgs

        ours, module.ServerArgs = module.ServerArgs, SparseServerArgs.__mro__[1]
        try:
            args = prepare_server_args(argv)
        finally:
            module.ServerArgs = ours
        return {name: getattr(args, name, None) for name in SHOWN}
    args = prepare_server_args(argv)
    again = pickle.loads(pickle.dumps(args))
    shown = {name: getattr(args, name) for name in SHOWN}
    shown["stat_loggers"] = {role: cls.__name__ for role, cls in (args.stat_loggers or {}).items()}
    return {**shown, "type": type(args).__name__, "config": args.sparse_resolved, "again": again.sparse_resolved, "again_active": again.sparse_active}


@pytest.fixture(scope="module")
def parse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parse]:
    """``parse(*flags)`` for a tiny model without weights; ``stock=True`` reads them as SGLang alone would."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    base = ["--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init", "--log-level", "error"]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_load) as process:
        yield lambda *flags, stock=False: process.submit(_parse, [*base, *flags], stock).result(timeout=300)


FLAGS: list[tuple[str, str, str, Any]] = [
    ("--sparse-algorithm", "streaming", "algorithm", "streaming"),
    ("--sparse-budget", "512", "budget", 512),
    ("--sparse-budget", "0.25", "budget", 0.25),
    ("--sparse-sink", "0", "sink", 0),
    ("--sparse-window", "128", "window", 128),
    ("--sparse-dense-layers", "0,1", "dense_layers", (0, 1)),
    ("--sparse-host-memory", "8GiB", "host_memory", "8 GiB"),
    ("--sparse-host-memory", "65536", "host_memory", "65536 tokens"),
    ("--sparse-device-memory", "0.5GiB", "device_memory", "0.5 GiB"),
    ("--sparse-buffer-factor", "3", "buffer_factor", 3.0),
]


@pytest.mark.parametrize(("flag", "text", "field", "want"), FLAGS)
def test_each_flag_reaches_the_configuration(parse: Parse, flag: str, text: str, field: str, want: Any) -> None:
    """And alone makes the run sparse: backend, radix cache, page size and batch limit follow."""
    got = parse(flag, text)
    value = getattr(got["config"], field)
    assert (str(value) if field.endswith("memory") else value) == want
    assert (got["attention_backend"], got["radix_cache_backend"], got["page_size"], got["max_running_requests"]) == ("sparse", "sparse", 16, 64)
    assert got["sparse_active"]
    assert got["disable_prefill_cuda_graph"]


def test_the_trace_directory_is_made(parse: Parse, tmp_path: Path) -> None:
    """Before the model loads, so that one that can't be made is found then."""
    assert parse("--sparse-trace", str(tmp_path / "a" / "run"))["config"].trace == str(tmp_path / "a" / "run")
    assert (tmp_path / "a" / "run").is_dir()


def test_a_file_and_flags_over_it(parse: Parse, tmp_path: Path) -> None:
    """``--sparse-config`` alone makes the run sparse; a flag wins."""
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: streaming\nbudget: 512\nworkspace_tokens: 128\n", encoding="utf-8")
    config = parse("--sparse-config", str(path), "--sparse-budget", "768")["config"]
    assert (config.algorithm, config.budget, config.workspace_tokens) == ("streaming", 768, 128)


def test_the_backend_by_name_is_sparse_with_defaults(parse: Parse) -> None:
    """As README's five-line start."""
    got = parse("--attention-backend", "sparse", "--radix-cache-backend", "sparse")
    assert got["config"].algorithm == "quest"
    assert got["sparse_active"]


def test_what_the_user_set_stays(parse: Parse) -> None:
    """Page size and batch limit are defaults only; with metrics our collector is in place."""
    got = parse("--sparse-budget", "1024", "--page-size", "32", "--max-running-requests", "7", "--enable-metrics")
    assert (got["page_size"], got["max_running_requests"]) == (32, 7)
    assert got["stat_loggers"] == {"scheduler": "SparseMetricsCollector"}


@pytest.mark.parametrize("flags", [(), ("--page-size", "4"), ("--max-running-requests", "3", "--enable-lora"), ("--attention-backend", "torch_native")])
def test_a_run_that_is_not_sparse_stays_stock(parse: Parse, flags: tuple[str, ...]) -> None:
    """Every field is as SGLang resolves it without us."""
    got, stock = parse(*flags), parse(*flags, stock=True)
    assert got["type"] == "SparseServerArgs"
    assert got["config"] is None
    assert not got["sparse_active"]
    assert not got["stat_loggers"]
    for name in ("attention_backend", "radix_cache_backend", "page_size", "max_running_requests", "disable_prefill_cuda_graph"):
        assert got[name] == stock[name]


WRONG = [
    ("--sparse-algorithm", "qest", "did you mean 'quest'"),
    ("--sparse-budget", "-1", r"budget\(=-1\)"),
    ("--sparse-budget", "64x", r"budget\(='64x'\)"),
    ("--sparse-budget", "1.0001", r"budget\(=1.0001\)"),
    ("--sparse-budget", "100", r"budget\(=100\) must hold sink\(=64\), window\(=256\)"),
    ("--sparse-sink", "-1", r"sink\(='-1'\)"),
    ("--sparse-window", "many", r"window\(='many'\)"),
    ("--sparse-dense-layers", "3-1", r"dense_layers\(='3-1'\)"),
    ("--sparse-host-memory", "4GB", r"host_memory\(='4GB'\)"),
    ("--sparse-device-memory", "0", r"device_memory\(='0'\)"),
    ("--sparse-buffer-factor", "0.5", r"buffer_factor\(='0.5'\)"),
    ("--sparse-trace", "", r"trace\(=''\)"),
    ("--sparse-config", "no/such.yaml", r"no/such\.yaml: No such file"),
]


@pytest.mark.parametrize(("flag", "text", "message"), WRONG)
def test_a_wrong_value_stops_the_start(parse: Parse, flag: str, text: str, message: str) -> None:
    """``ValueError`` while the arguments are read: no process, no weights yet."""
    with pytest.raises(ValueError, match=message):
        parse(f"{flag}={text}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--page-size", "1"), "--page-size 1 is not supported"),
        (("--attention-backend", "torch_native"), "--attention-backend torch_native contradicts"),
        (("--enable-lora",), "does not support LoRA yet"),
        (("--kv-cache-dtype", "fp8_e5m2"), "KV type other than the model's"),
        (("--dp-size", "2"), "data parallelism"),
    ],
)
def test_a_combination_that_is_not_served_stops_the_start(parse: Parse, flags: tuple[str, ...], message: str) -> None:
    """By name; the table is in ``test_refusals``."""
    with pytest.raises(ValueError, match=message):
        parse("--sparse-budget", "1024", *flags)


def test_the_radix_cache_alone_is_refused(parse: Parse) -> None:
    """It would do nothing without the backend."""
    with pytest.raises(ValueError, match="--radix-cache-backend sparse needs --attention-backend sparse"):
        parse("--radix-cache-backend", "sparse")


def test_a_directory_with_a_run_is_not_recorded_into(parse: Parse, tmp_path: Path) -> None:
    """Nor a path that is a file, nor one below a file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "meta.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="holds a recorded run already"):
        parse("--sparse-trace", str(tmp_path / "run"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a directory"):
        parse("--sparse-trace", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="can't be made"):
        parse("--sparse-trace", str(tmp_path / "file" / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["meta.json"]


def test_pickling_keeps_the_configuration(parse: Parse) -> None:
    """The arguments go to the scheduler's process pickled."""
    got = parse("--sparse-budget", "0.5", "--sparse-dense-layers", "0")
    assert got["again"] == got["config"]
    assert got["again_active"]
    assert got["again"].budget == 0.5
    assert parse()["again"] is None
