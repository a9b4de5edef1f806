"""What a sparse run can't serve yet, refused at start, by name, with what to change (DESIGN section 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_ext.config import PAGE_SIZES


class Refusal(NamedTuple):
    """``applies(server_args)`` says whether the combination is asked for; ``what`` names it, ``change`` says what to do."""

    what: str
    change: str
    applies: Callable[[Any], bool]


def _set(name: str, *harmless: object) -> Callable[[Any], bool]:
    """True when field ``name`` of the server arguments holds something else than ``None``, ``False`` or ``harmless``."""
    return lambda args: getattr(args, name, None) not in (None, False, *harmless)


def _other_kv_dtype(args: Any) -> bool:
    """Quantised KV, or 16 bits of another kind: what ``--dtype auto`` will be is not known yet."""
    kv = getattr(args, "kv_cache_dtype", None)
    return kv not in (None, "auto") and not (kv in ("bfloat16", "bf16") and args.dtype == "bfloat16")


REFUSALS = (
    Refusal("speculative decoding", "leave out --speculative-algorithm", _set("speculative_algorithm")),
    Refusal("prefill-decode disaggregation", "leave out --disaggregation-mode", _set("disaggregation_mode", "null")),
    Refusal("LoRA", "leave out --enable-lora and --lora-paths", lambda args: bool(getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None))),
    Refusal("hierarchical cache (HiCache)", "leave out --enable-hierarchical-cache: KV is at home already", _set("enable_hierarchical_cache")),
    Refusal("HiSparse", "leave out --enable-hisparse", _set("enable_hisparse")),
    Refusal("LMCache", "leave out --enable-lmcache", _set("enable_lmcache")),
    Refusal("FlexKV", "leave out --enable-flexkv", _set("enable_flexkv")),
    Refusal("a KV type other than the model's", "leave out --kv-cache-dtype (bfloat16 goes with --dtype bfloat16)", _other_kv_dtype),
    Refusal("pipeline parallelism", "set --pp-size 1", _set("pp_size", 1)),
    Refusal("data parallel attention", "leave out --enable-dp-attention", _set("enable_dp_attention")),
    Refusal("data parallelism", "set --dp-size 1", _set("dp_size", 1)),
    Refusal("attention context parallelism", "set --attn-cp-size 1", _set("attn_cp_size", 1)),
    Refusal("prefill context parallelism", "leave out --enable-prefill-cp", _set("enable_prefill_cp")),
    Refusal("decode context parallelism", "set --dcp-size 1", _set("dcp_size", 1)),
    Refusal("two-batch overlap", "leave out --enable-two-batch-overlap", _set("enable_two_batch_overlap")),
    Refusal("the memory saver", "leave out --enable-memory-saver", _set("enable_memory_saver")),
    Refusal("deterministic inference mode", "leave out --enable-deterministic-inference", _set("enable_deterministic_inference")),
    Refusal("session-held KV of streaming sessions", "leave out --enable-streaming-session", _set("enable_streaming_session")),
    Refusal("the session radix cache", "leave out --enable-session-radix-cache", _set("enable_session_radix_cache")),
    Refusal("the page-major KV layout", "leave out --enable-page-major-kv-layout", _set("enable_page_major_kv_layout")),
    Refusal("unified memory of hybrid models", "leave out --enable-unified-memory", _set("enable_unified_memory")),
    Refusal("the KV canary", "leave out --kv-canary: its KV is not where the canary looks", _set("kv_canary", "none")),
    Refusal("multi-item scoring", "leave out --enable-mis", _set("enable_mis")),
    Refusal("embedding models", "leave out --is-embedding: nothing is decoded", _set("is_embedding")),
    Refusal("an encoder-only server", "leave out --encoder-only", _set("encoder_only")),
    Refusal("PD multiplexing", "leave out --enable-pdmux", _set("enable_pdmux")),
    Refusal("diffusion LLM decoding", "leave out --dllm-algorithm", _set("dllm_algorithm")),
    Refusal("prefill-only without KV", "leave out --prefill-only-disable-kv-cache", _set("prefill_only_disable_kv_cache")),
)


def check_server_args(args: Any) -> None:
    """Raise ``ValueError`` for anything in the server arguments that a sparse run can't serve."""
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise ValueError(f"sparse attention over host-resident KV does not support {refusal.what} yet: {refusal.change}, or the --sparse-* flags")
    if args.page_size not in PAGE_SIZES:
        raise ValueError(f"--page-size {args.page_size} is not supported with sparse attention: choose one of {', '.join(map(str, PAGE_SIZES))} (default 16)")
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, name, None)
        if value not in (None, "sparse"):
            raise ValueError(f"--{name.replace('_', '-')} {value} contradicts the --sparse-* flags: leave it out or set it to sparse")
    if args.radix_cache_backend not in (None, "sparse"):
        raise ValueError(f"--radix-cache-backend {args.radix_cache_backend} contradicts the --sparse-* flags: leave it out or set it to sparse")


def check_model(model_config: Any) -> None:
    """Raise ``ValueError`` for a model whose attention a sparse run can't serve."""
    name = type(model_config.hf_config).__name__
    kind = model_config.attention_arch.name
    if kind != "MHA":
        raise ValueError(f"{name}: {kind} attention is not supported with sparse attention yet, only MHA, MQA and GQA: leave out the --sparse-* flags")
    text = model_config.hf_text_config
    what = _other_attention(text)
    if what:
        raise ValueError(f"{name}: {what} is not supported with sparse attention yet, only full attention: leave out the --sparse-* flags")
    if getattr(model_config, "has_attention_sinks", False):
        raise ValueError(f"{name}: learned attention sinks are not supported with sparse attention yet: leave out the --sparse-* flags")
    if not getattr(model_config, "is_generation", True):
        raise ValueError(f"{name}: models that don't generate are not supported with sparse attention: leave out the --sparse-* flags")
    if getattr(model_config, "is_encoder_decoder", False) or getattr(model_config, "is_multimodal", False):
        raise ValueError(f"{name}: encoder-decoder and multimodal models are not supported with sparse attention yet: leave out the --sparse-* flags")


def _other_attention(text: Any) -> str:
    """What about the layers is not plain full attention, by the names that model configurations use; empty if nothing."""
    types = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if types:
        return f"a layer of type {', '.join(sorted(types))}"
    blocks = set(getattr(text, "layers_block_type", None) or ()) - {"attention"}
    if blocks:
        return f"a layer of type {', '.join(sorted(blocks))}"
    for key in ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size"):
        window = getattr(text, key, None)
        if window is not None and getattr(text, "use_sliding_window", True):
            return f"{key} {window}"
    cap = getattr(text, "attn_logit_softcapping", None)
    return f"attn_logit_softcapping {cap}" if cap else ""


def check_platform(device: str, tp_size: int) -> None:
    """Raise ``ValueError`` where the serving path does not run yet."""
    if device != "cpu":
        raise ValueError(
            f"--device {device}: the sparse backend serves on the CPU reference platform only so far; its GPU operators are not part of this version. "
            "Leave out the --sparse-* flags, or run on a machine without a GPU"
        )
    if tp_size != 1:
        raise ValueError(f"--tp-size {tp_size}: the CPU reference platform runs one rank; set --tp-size 1")
