"""Whether a rank of a model fits a node's memory, from what is known before a byte of weights is there.

Three parts are added up and compared with what vLLM may take (its utilization of all memory; a Spark's GPU has none
of its own):

* weights: the bytes of the safetensors files, divided by the ranks. Norms and a few projections are on every rank, so
  the truth is a little more.
* KV cache of one request of the wished context, which is what vLLM asks for at its start. Its sizes are those of
  vLLM's ``kv_cache_interface.py`` (read in 0.32): keys and values of every KV head of the rank; one latent vector and
  the rotary part, on every rank, for multi-head latent attention; window and step budget for layers with a window.
* ``BESIDE``: what a rank takes beside them.

An architecture whose cache is not one of these is not guessed at: the verdict is then that it cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

BESIDE = int(5.6 * GIB)
"""Bytes for activations, CUDA graphs, NCCL and the runtime: what a public report found missing in its accounting on two
Sparks (GLM-5.3-Flash-EXL3 on two DGX Sparks, its issue 118)."""

UTILIZATION = 0.92
"""vLLM's own share of the memory when nothing is said (``CacheConfig`` of 0.32)."""

STEP = 8192
"""Tokens of a step when nothing is said: vLLM's default for a server on a large GPU."""

HEADS = {
    "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text",
}  # fmt: skip
"""Model types whose layers all keep keys and values of their KV heads, of all tokens or of a window."""

LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
"""Model types with multi-head latent attention and nothing beside it (later ones add compressors and indexers)."""

BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "half": 2, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Bytes of a number in the cache, by vLLM's names."""

FACTS = (
    "dtype", "torch_dtype", "head_dim", "hidden_size", "kv_lora_rank", "layer_types", "max_position_embeddings",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "qk_rope_head_dim",
    "sliding_window", "use_sliding_window",
)  # fmt: skip


class UnknownError(Exception):
    """The size of the cache cannot be told; the text says why."""


@dataclass(frozen=True)
class Cache:
    """KV cache of a rank in bytes: ``fixed + each * tokens`` up to ``limit`` tokens of context."""

    fixed: int
    each: int


@dataclass(frozen=True)
class Verdict:
    """Whether a rank fits (None: cannot be told), the numbers as a sentence, a warning where memory is short now."""

    fits: bool | None
    text: str
    short: str = ""


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few values of a config.json that count here; those of the text part where there are several."""
    text = config.get("text_config")
    flat = {**config, **(text if isinstance(text, dict) else {})}
    return {name: flat[name] for name in FACTS if flat.get(name) is not None}


def tokens(value: Any) -> int:
    """Return a number of tokens as vLLM reads it: 32768, 32k (thousands), 32K (times 1024).

    Raises:
        UnknownError: anything else.
    """
    found = re.fullmatch(r"(\d+)([kKmM]?)", str(value).strip())
    if not found or not int(found[1]):
        raise UnknownError(f"max-model-len={value} is no number of tokens")
    return int(found[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[found[2]]


def cache(config: Mapping[str, Any], engine: Mapping[str, Any], ranks: int) -> Cache:
    """Return what the KV cache of one request takes on each of ``ranks`` ranks.

    Raises:
        UnknownError: an architecture, a type or a layout of the cache that is not known here.
    """
    kind = str(config.get("model_type", "without a model_type"))
    if kind not in HEADS | LATENT:
        raise UnknownError(f"the cache of the architecture {kind} is not known here")
    try:
        layers = int(config["num_hidden_layers"])
        size = _number_bytes(config, engine)
        if kind in LATENT:
            return Cache(0, layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * size)
        heads = int(config["num_attention_heads"])
        width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        mine = max(1, int(config.get("num_key_value_heads", heads)) // ranks)
    except KeyError as error:
        raise UnknownError(f"its config.json does not say {error.args[0]}") from error
    windowed = _windowed(config, layers)
    layer = 2 * mine * width * size
    window = int(config.get("sliding_window", 0)) + int(engine.get("max-num-batched-tokens", STEP))
    return Cache(windowed * layer * window, (layers - windowed) * layer)


def _number_bytes(config: Mapping[str, Any], engine: Mapping[str, Any]) -> int:
    wished = str(engine.get("kv-cache-dtype", "auto"))
    if wished == "auto":
        wished = str(engine.get("dtype", "auto"))
    if wished == "auto":
        wished = str(config.get("dtype") or config.get("torch_dtype") or "without a dtype")
        # vLLM serves models of 32 bits with 16 unless told otherwise.
        wished = {"float32": "bfloat16"}.get(wished, wished)
    if wished not in BYTES:
        raise UnknownError(f"the size of a cache of type {wished} is not known here")
    return BYTES[wished]


def _windowed(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers keep a window of tokens only."""
    kinds: Sequence[str] = config.get("layer_types") or []
    if not kinds:
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise UnknownError("its config.json does not say which layers have a window")
        return 0
    if strange := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnknownError(f"the cache of layers of type {', '.join(strange)} is not known here")
    if len(kinds) != layers:
        raise UnknownError(f"its config.json names {layers} layers and the types of {len(kinds)}")
    return list(kinds).count("sliding_attention")


def judge(
    node: str,
    total: int,
    available: int,
    weights: int,
    config: Mapping[str, Any],
    engine: Mapping[str, Any],
    ranks: int,
) -> Verdict:
    """Judge one rank. ``total`` and ``available`` are MemTotal and MemAvailable of the node, ``weights`` those of all
    ranks, in bytes; ``config`` is made by ``facts``, ``engine`` holds the options of ``vllm serve``."""
    share = float(engine.get("gpu-memory-utilization", UTILIZATION))
    limit, mine = int(total * share), weights // ranks
    room = f"{node}: found {_gib(total)} of memory, {_gib(limit)} of it for vLLM (gpu-memory-utilization {share:g})"
    if not weights:
        return Verdict(None, f"{room}; cannot tell whether the model fits: the size of its weights is not known yet")
    context, kept, unknown = 0, Cache(0, 0), ""
    try:
        context, kept = _wished(config, engine, ranks)
    except UnknownError as why:
        unknown = str(why)
    held = kept.fixed + kept.each * context
    need = mine + held + BESIDE
    told = f"{_gib(mine)} of weights for each of {ranks} ranks, {_gib(BESIDE)} beside them"
    if not unknown:
        told += f", {_gib(held)} of KV cache for {context} tokens"
    if need > limit:
        left = (limit - mine - BESIDE - kept.fixed) // kept.each if kept.each else 0
        mend = f"lower max-model-len in serve_engine_args to {left // 256 * 256} or less" if left >= 256 else SMALLER
        return Verdict(False, f"{room}, expected {_gib(need)}: {told}; {mend}")
    short = ""
    if need > available:
        short = f"{node}: {_gib(available)} of memory are available now, a rank takes {_gib(need)}: stop what else runs"
    if unknown:
        return Verdict(None, f"{room}; {told} fit, cannot tell what the KV cache takes: {unknown}", short)
    return Verdict(True, f"{room}; the model fits with {_gib(need)}: {told}", short)


SMALLER = "choose smaller weights (another quantization), or more nodes"


def _wished(config: Mapping[str, Any], engine: Mapping[str, Any], ranks: int) -> tuple[int, Cache]:
    """Return the wished context in tokens and the cache that it takes."""
    context = engine.get("max-model-len", config.get("max_position_embeddings"))
    if context is None:
        raise UnknownError("neither max-model-len nor its config.json says how long the context is")
    if given := engine.get("kv-cache-memory-bytes"):
        # vLLM then takes these bytes, whatever the architecture.
        return tokens(context), Cache(int(given), 0)
    return tokens(context), cache(config, engine, ranks)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
