"""What a sparse run can't serve is refused by name, with what to change; what it can is not."""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.config import PAGE_SIZES
from sglang_ext.refusals import REFUSALS, check_model, check_platform, check_server_args

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

HARMLESS: dict[str, Any] = {
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_lora": None,
    "lora_paths": None,
    "enable_hierarchical_cache": False,
    "enable_hisparse": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "pp_size": 1,
    "enable_dp_attention": False,
    "dp_size": 1,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "dcp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_memory_saver": False,
    "enable_deterministic_inference": False,
    "enable_streaming_session": False,
    "enable_session_radix_cache": False,
    "enable_page_major_kv_layout": False,
    "enable_unified_memory": False,
    "kv_canary": "none",
    "enable_mis": False,
    "is_embedding": False,
    "encoder_only": False,
    "enable_pdmux": False,
    "dllm_algorithm": None,
    "prefill_only_disable_kv_cache": False,
    "page_size": 16,
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "radix_cache_backend": None,
}
"""What the checks look at, as SGLang has it when nothing is asked for."""

OFFENDING: list[tuple[str, Any, str, str]] = [
    ("speculative_algorithm", "EAGLE3", "speculative decoding", "--speculative-algorithm"),
    ("disaggregation_mode", "prefill", "prefill-decode disaggregation", "--disaggregation-mode"),
    ("disaggregation_mode", "decode", "prefill-decode disaggregation", "--disaggregation-mode"),
    ("enable_lora", True, "LoRA", "--enable-lora"),
    ("lora_paths", ["a=b"], "LoRA", "--lora-paths"),
    ("enable_hierarchical_cache", True, "HiCache", "--enable-hierarchical-cache"),
    ("enable_hisparse", True, "HiSparse", "--enable-hisparse"),
    ("enable_lmcache", True, "LMCache", "--enable-lmcache"),
    ("enable_flexkv", True, "FlexKV", "--enable-flexkv"),
    ("kv_cache_dtype", "fp8_e4m3", "KV type", "--kv-cache-dtype"),
    ("kv_cache_dtype", "fp8_e5m2", "KV type", "--kv-cache-dtype"),
    ("kv_cache_dtype", "bfloat16", "KV type", "--dtype bfloat16"),
    ("pp_size", 2, "pipeline parallelism", "--pp-size 1"),
    ("enable_dp_attention", True, "data parallel attention", "--enable-dp-attention"),
    ("dp_size", 2, "data parallelism", "--dp-size 1"),
    ("attn_cp_size", 2, "attention context parallelism", "--attn-cp-size 1"),
    ("enable_prefill_cp", True, "prefill context parallelism", "--enable-prefill-cp"),
    ("dcp_size", 2, "decode context parallelism", "--dcp-size 1"),
    ("enable_two_batch_overlap", True, "two-batch overlap", "--enable-two-batch-overlap"),
    ("enable_memory_saver", True, "memory saver", "--enable-memory-saver"),
    ("enable_deterministic_inference", True, "deterministic inference", "--enable-deterministic-inference"),
    ("enable_streaming_session", True, "streaming sessions", "--enable-streaming-session"),
    ("enable_session_radix_cache", True, "session radix cache", "--enable-session-radix-cache"),
    ("enable_page_major_kv_layout", True, "page-major KV layout", "--enable-page-major-kv-layout"),
    ("enable_unified_memory", True, "unified memory", "--enable-unified-memory"),
    ("kv_canary", "raise", "KV canary", "--kv-canary"),
    ("enable_mis", True, "multi-item scoring", "--enable-mis"),
    ("is_embedding", True, "embedding models", "--is-embedding"),
    ("encoder_only", True, "encoder-only", "--encoder-only"),
    ("enable_pdmux", True, "PD multiplexing", "--enable-pdmux"),
    ("dllm_algorithm", "LowConfidence", "diffusion LLM", "--dllm-algorithm"),
    ("prefill_only_disable_kv_cache", True, "prefill-only without KV", "--prefill-only-disable-kv-cache"),
    *((name, "flashinfer", f"--{name.replace('_', '-')} flashinfer contradicts", "leave it out") for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")),
    ("radix_cache_backend", "unified", "--radix-cache-backend unified contradicts", "set it to sparse"),
]


def _args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**HARMLESS, **changes})


def test_harmless_arguments_pass() -> None:
    """The defaults, our own names, and a KV type that is the model's."""
    check_server_args(_args())
    check_server_args(_args(attention_backend="sparse", radix_cache_backend="sparse", lora_paths=[], enable_lora=False))
    for name in ("bfloat16", "bf16"):
        check_server_args(_args(kv_cache_dtype=name, dtype="bfloat16"))


@pytest.mark.parametrize(("field", "value", "what", "change"), OFFENDING)
def test_each_offending_value_is_refused(field: str, value: Any, what: str, change: str) -> None:
    """Naming the feature and what to change."""
    with pytest.raises(ValueError, match="sparse") as caught:
        check_server_args(_args(**{field: value}))
    assert what in str(caught.value)
    assert change in str(caught.value)


def test_every_refusal_is_offended_by_a_case() -> None:
    """An entry without a case would be one that nobody ever saw refuse."""
    for refusal in REFUSALS:
        assert any(refusal.applies(_args(**{field: value})) for field, value, _, _ in OFFENDING), refusal.what
        assert not refusal.applies(_args()), refusal.what
        assert "--" in refusal.change


@pytest.mark.parametrize("page_size", [1, 4, 12, 24, 128, 256])
def test_other_page_sizes_are_refused(page_size: int) -> None:
    """With the supported ones."""
    with pytest.raises(ValueError, match=rf"--page-size {page_size} is not supported.*choose one of 8, 16, 32, 64"):
        check_server_args(_args(page_size=page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_supported_page_sizes_pass(page_size: int) -> None:
    """All that is promised."""
    check_server_args(_args(page_size=page_size))


@needs_sglang
def test_no_refusal_is_dead() -> None:
    """Every field that is looked at exists in SGLang's arguments and has the harmless value as its default, and every flag exists.

    A name that SGLang dropped would never refuse anything, without a word.
    """
    import argparse
    import dataclasses
    import re

    from sglang.srt.server_args import ServerArgs

    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    for name, value in HARMLESS.items():
        assert name in fields
        assert fields[name].default == value or name == "page_size", name
    looked_at = {name for refusal in REFUSALS for name in _names(refusal.applies)}
    assert looked_at <= set(HARMLESS)

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    for refusal in REFUSALS:
        named = set(re.findall(r"--[a-z-]+[a-z]", refusal.change))
        assert named <= flags, refusal.change


def _names(applies: Any) -> set[str]:
    """Fields that a refusal looks at: those it closes over, and those named in its source."""
    closed = {cell.cell_contents for cell in applies.__closure__ or () if isinstance(cell.cell_contents, str)}
    if closed:
        return closed
    source = inspect.getsource(applies)
    return {name for name in HARMLESS if f'"{name}"' in source or f"args.{name}" in source}


def _model(architecture: str = "MHA", text: dict[str, Any] | None = None, **config: Any) -> SimpleNamespace:
    """A model configuration as SGLang makes it."""
    return SimpleNamespace(
        hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace(**(text or {})), attention_arch=SimpleNamespace(name=architecture), **config
    )


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "use_sliding_window": True},
        {"layer_types": ["full_attention"] * 4, "sliding_window": None},
        {"layer_types": None, "attention_chunk_size": None, "attn_logit_softcapping": None},
    ],
)
def test_full_attention_passes(text: dict[str, Any]) -> None:
    """Also a window that the model has but does not use."""
    check_model(_model(text=text))
    check_model(_model(text=text, is_encoder_decoder=False, is_multimodal=False, is_generation=True, has_attention_sinks=False))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (_model("MLA"), "MLA attention is not supported"),
        (_model(text={"sliding_window": 4096}), "sliding_window 4096"),
        (_model(text={"sliding_window": 128, "use_sliding_window": True}), "sliding_window 128"),
        (_model(text={"sliding_window_size": 512}), "sliding_window_size 512"),
        (_model(text={"window_size": 256}), "window_size 256"),
        (_model(text={"attention_chunk_size": 8192}), "attention_chunk_size 8192"),
        (_model(text={"layer_types": ["full_attention", "sliding_attention"]}), "a layer of type sliding_attention"),
        (_model(text={"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False}), "a layer of type sliding_attention"),
        (_model(text={"layer_types": ["linear_attention", "full_attention", "chunked_attention"]}), "chunked_attention, linear_attention"),
        (_model(text={"layers_block_type": ["mamba", "attention"]}), "a layer of type mamba"),
        (_model(text={"attn_logit_softcapping": 50.0}), "attn_logit_softcapping 50.0"),
        (_model(has_attention_sinks=True), "learned attention sinks"),
        (_model(is_generation=False), "models that don't generate"),
        (_model(is_encoder_decoder=True), "encoder-decoder"),
        (_model(is_multimodal=True), "multimodal"),
    ],
)
def test_other_attention_is_refused(model: SimpleNamespace, what: str) -> None:
    """Naming the model, what about it, and what to change (edge case 33)."""
    with pytest.raises(ValueError, match=r"^SimpleNamespace: .*leave out the --sparse-\* flags$") as caught:
        check_model(model)
    assert what in str(caught.value)


def test_only_one_cpu_rank_is_served_so_far() -> None:
    """A GPU and several ranks are refused with what to do."""
    check_platform("cpu", 1)
    with pytest.raises(ValueError, match=r"--device cuda: .*CPU reference platform only so far.*Leave out the --sparse-\* flags"):
        check_platform("cuda", 1)
    with pytest.raises(ValueError, match=r"--tp-size 2: .*set --tp-size 1"):
        check_platform("cpu", 2)
