"""Memory that does not fit is refused at start with the arithmetic, before anything of its size is allocated (edge case 21)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="sglang is not installed (extra 'serve')")
torch = pytest.importorskip("torch")

from sglang_ext import plugin  # noqa: E402
from sglang_ext.config import build_config  # noqa: E402
from sglang_ext.memory.home import Home  # noqa: E402
from sglang_ext.runtime import SparseRuntime  # noqa: E402

TOKEN = 46_080


def _configurator(monkeypatch: pytest.MonkeyPatch, host_memory: str) -> Any:
    import sglang.srt.model_executor.pool_configurator as module

    import sglang_ext.refusals

    monkeypatch.setattr(module, "create_memory_pool_configurator", lambda _: SimpleNamespace(_cell_size=TOKEN))
    monkeypatch.setattr(sglang_ext.refusals, "check_model", lambda _: None)
    config = build_config({"host_memory": host_memory})
    args = SimpleNamespace(sparse_active=True, sparse_resolved=config, page_size=16)
    return SimpleNamespace(server_args=args, is_draft_worker=False, model_config=None)


def test_home_size_is_what_the_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens or GiB; a run that is not sparse keeps SGLang's number."""
    assert plugin.home_bytes(lambda *_: 7, _configurator(monkeypatch, "1000"), 0) == 1000 * TOKEN
    assert plugin.home_bytes(lambda *_: 7, _configurator(monkeypatch, "0.5GiB"), 0) == 2**29
    stock = SimpleNamespace(server_args=SimpleNamespace(), is_draft_worker=False)
    assert plugin.home_bytes(lambda *_: 7, stock, 0) == 7


def test_home_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has what was asked, what a token costs and what there is."""
    with pytest.raises(ValueError, match=r"--sparse-host-memory 900000 GiB is 900000.00 GiB \(46080 bytes a token.*are available"):
        plugin.home_bytes(lambda *_: 7, _configurator(monkeypatch, "900000GiB"), 0)


def test_home_smaller_than_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one page must fit."""
    with pytest.raises(ValueError, match=r"holds no page: one is 737280 bytes \(16 tokens x 46080 bytes\)"):
        plugin.home_bytes(lambda *_: 7, _configurator(monkeypatch, "15"), 0)


def _runtime(context_length: int = 512, **values: Any) -> SparseRuntime:
    home = Home(2, 65, 1, 16, 8, torch.float32, pin=False)
    pool = SimpleNamespace(
        home=home, layer_num=2, head_num=1, page_size=16, head_dim=8, pages=65, size=1024, store_dtype=torch.float32, device="cpu", start_layer=0
    )
    return SparseRuntime(build_config(values), pool, None, query_heads=3, requests=4, context_length=context_length)  # type: ignore[arg-type]


def test_frames_follow_from_the_device_memory() -> None:
    """Tokens: of all layers and heads. GiB: what is left beside summaries and the prefill workspace."""
    assert _runtime(device_memory=160, budget=512).ledger.total == 160 // 16 * 2 * 1
    summaries = 2 * 65 * 2 * 8 * 4
    workspace = 2 * 512 * 2 * 8 * 4
    nbytes = int(2**30 * 0.001)
    assert _runtime(device_memory="0.001GiB", budget=512).ledger.total == (nbytes - summaries - workspace) // (2 * 16 * 8 * 4)


def test_device_memory_that_holds_no_request_is_refused() -> None:
    """No room beside the summaries; too few frames; more than the machine has."""
    with pytest.raises(ValueError, match="leaves no room for frames: summaries of 65 home pages take"):
        _runtime(2048, device_memory="0.0001GiB", budget=512)
    with pytest.raises(ValueError, match=r"needs .* device frames"):
        _runtime(device_memory=16, budget=512, sink=0, window=0, dense_layers=[0]).ledger.check_possible(400)
    with pytest.raises(ValueError, match=r"asks for .* GiB of frames, .* are available"):
        _runtime(device_memory="900000GiB", budget=512)


def test_layers_and_heads_must_exist() -> None:
    """A layer that the model lacks is refused by number."""
    with pytest.raises(ValueError, match=r"--sparse-dense-layers \[2\]: this model has layers 0\.\.1"):
        _runtime(device_memory=160, budget=512, dense_layers=[2])


def test_layers_that_ask_for_more_are_refused() -> None:
    """Logit caps, learned sinks, windows and other attention types would give a wrong answer with healthy metrics (edge cases 33, 35)."""
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_ext.attention import check_layer

    def layer(**changes: Any) -> Any:
        plain = {"layer_id": 3, "logit_cap": 0.0, "sliding_window_size": -1, "attn_type": AttentionType.DECODER, "is_cross_attention": False}
        return SimpleNamespace(**{**plain, **changes})

    check_layer(layer(), True, {})
    check_layer(layer(), True, {"sinks": None})
    for changes, save, extra, text in (
        ({"logit_cap": 30.0}, True, {}, "logit cap 30"),
        ({"sliding_window_size": 128}, True, {}, "sliding window 128"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, True, {}, "attention type"),
        ({"is_cross_attention": True}, True, {}, "attention type"),
        ({}, False, {}, "save_kv_cache=False"),
        ({}, True, {"sinks": torch.zeros(1)}, "sinks"),
    ):
        with pytest.raises(ValueError, match=f"layer 3 asks for .*{text}"):
            check_layer(layer(**changes), save, extra)
