"""Memory fit against the configurations of known models, whose caches were published or follow by hand."""

from __future__ import annotations

import json

import model_fit
import pytest
from ansible.module_utils.sparkpair.model_fit import BESIDE, GIB, UnknownError, cache, facts, judge, tokens
from ansible.module_utils.testing import patch_module_args

from lab import tiny_model

SPARK = 127_598_544 * 1024
"""MemTotal of a DGX Spark in bytes (public reports: 121.6 GiB)."""

# The published config.json of each, the values that count.
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_4B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 2560, "torch_dtype": "bfloat16", "max_position_embeddings": 262144,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "hidden_size": 4096, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_size": 2880, "sliding_window": 128, "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
HYBRID = {
    "model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 16, "dtype": "bfloat16", "head_dim": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ranks", "engine", "fixed", "each"),
    [
        pytest.param(LLAMA_8B, 1, {}, 0, 128 * 1024, id="128 KiB a token, as published for Llama 3 8B"),
        pytest.param(LLAMA_8B, 2, {"kv-cache-dtype": "fp8"}, 0, 32 * 1024, id="two ranks, eight bits"),
        pytest.param(QWEN3_4B, 2, {}, 0, 36 * 2 * 4 * 128 * 2, id="head_dim is not hidden / heads"),
        pytest.param(QWEN3_235B, 8, {}, 0, 94 * 2 * 1 * 128 * 2, id="a rank holds at least one KV head"),
        pytest.param(DEEPSEEK_V3, 1, {}, 0, 70_272, id="70 KB a token, as published for DeepSeek V3"),
        pytest.param(DEEPSEEK_V3, 2, {}, 0, 70_272, id="a latent vector is on every rank"),
        pytest.param(GPT_OSS_120B, 1, {}, 18 * 2048 * (128 + 8192), 18 * 2048, id="half of the layers have a window"),
        pytest.param(
            GPT_OSS_120B, 1, {"max-num-batched-tokens": 1024}, 18 * 2048 * 1152, 18 * 2048, id="window and a step"
        ),
        pytest.param(tiny_model.config(), 2, {"dtype": "float32"}, 0, 2 * 2 * 2 * 32 * 4, id="the lab's"),
        pytest.param(
            {"text_config": LLAMA_8B, "model_type": "llava"}, 1, {}, 0, 128 * 1024, id="a model with pictures"
        ),
    ],
)
def test_the_cache_of_known_models(config, ranks, engine, fixed, each):
    found = cache(facts(config), engine, ranks)
    assert (found.fixed, found.each) == (fixed, each)


@pytest.mark.parametrize(
    ("config", "engine", "why"),
    [
        ({**LLAMA_8B, "model_type": "deepseek_v4"}, {}, "architecture deepseek_v4"),
        ({}, {}, "architecture without a model_type"),
        (HYBRID, {}, "layers of type linear_attention"),
        ({**LLAMA_8B, "sliding_window": 4096}, {}, "which layers have a window"),
        ({**GPT_OSS_120B, "num_hidden_layers": 3}, {}, "names 3 layers and the types of 36"),
        ({k: v for k, v in LLAMA_8B.items() if k != "num_hidden_layers"}, {}, "does not say num_hidden_layers"),
        (LLAMA_8B, {"kv-cache-dtype": "nvfp4_ds_mla"}, "cache of type nvfp4_ds_mla"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, {}, "cache of type int3"),
    ],
)
def test_what_is_not_known_is_not_guessed(config, engine, why):
    with pytest.raises(UnknownError, match=why):
        cache(facts(config), engine, 2)
    verdict = judge("spark-a", SPARK, SPARK, 8 * GIB, facts(config), {"max-model-len": 4096, **engine}, 2)
    assert verdict.fits is None
    assert "cannot tell what the KV cache takes" in verdict.text and "4.0 GiB of weights for each of 2" in verdict.text


@pytest.mark.parametrize(("text", "count"), [(32768, 32768), ("32768", 32768), ("32k", 32000), ("32K", 32768)])
def test_tokens_are_read_as_vllm_reads_them(text, count):
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["auto", "-1", "0", "", "1.5", True])
def test_a_context_that_is_no_number_is_not_guessed(text):
    with pytest.raises(UnknownError):
        tokens(text)


def test_a_model_that_fits_is_told_with_its_numbers():
    verdict = judge(
        "spark-a", SPARK, SPARK, 16 * GIB, facts(LLAMA_8B), {"gpu-memory-utilization": 0.85, "max-model-len": 131072}, 2
    )
    assert verdict.fits is True and verdict.short == ""
    assert verdict.text == (
        "spark-a: found 121.7 GiB of memory, 103.4 GiB of it for vLLM (gpu-memory-utilization 0.85); the model fits "
        "with 21.6 GiB: 8.0 GiB of weights for each of 2 ranks, 5.6 GiB beside them, 8.0 GiB of KV cache for 131072 "
        "tokens"
    )


def test_a_context_that_is_too_long_says_which_one_is_not():
    engine = {"gpu-memory-utilization": 0.85, "max-model-len": 2_000_000}
    verdict = judge("spark-a", SPARK, SPARK, 16 * GIB, facts(LLAMA_8B), engine, 2)
    assert verdict.fits is False
    longest = int(verdict.text.split("lower max-model-len in serve_engine_args to ")[1].split()[0])
    assert judge("a", SPARK, SPARK, 16 * GIB, facts(LLAMA_8B), {**engine, "max-model-len": longest}, 2).fits
    assert (
        judge("a", SPARK, SPARK, 16 * GIB, facts(LLAMA_8B), {**engine, "max-model-len": longest + 512}, 2).fits is False
    )


@pytest.mark.parametrize("config", [LLAMA_8B, {}])
def test_weights_that_are_too_large_are_refused_whatever_the_architecture(config):
    verdict = judge("spark-a", SPARK, SPARK, 400 * GIB, facts(config), {"max-model-len": 1024}, 2)
    assert verdict.fits is False
    assert "200.0 GiB of weights for each of 2 ranks" in verdict.text and "choose smaller weights" in verdict.text


def test_bytes_that_vllm_is_given_for_the_cache_count_for_every_architecture():
    engine = {"kv-cache-memory-bytes": 12 * GIB, "gpu-memory-utilization": 0.80, "max-model-len": 1048576}
    verdict = judge("spark-a", SPARK, SPARK, 156 * 10**9, {"model_type": "deepseek_v4"}, engine, 2)
    assert verdict.fits is True and "12.0 GiB of KV cache for 1048576 tokens" in verdict.text


def test_the_share_without_a_word_is_vllms_own():
    assert "112.0 GiB of it for vLLM (gpu-memory-utilization 0.92)" in judge("a", SPARK, SPARK, 1, {}, {}, 2).text


def test_weights_of_unknown_size_are_said_to_be():
    verdict = judge("spark-a", SPARK, SPARK, 0, {}, {}, 2)
    assert verdict.fits is None and "is not known yet" in verdict.text


def test_memory_that_others_hold_is_warned_of():
    verdict = judge("spark-a", SPARK, BESIDE, 8 * GIB, facts(LLAMA_8B), {"max-model-len": 4096}, 2)
    assert verdict.fits is True
    assert verdict.short.startswith("spark-a: 5.6 GiB of memory are available now, a rank takes 9.8 GiB")


def fit(root, capsys, **changes):
    """What the module answers."""
    arguments = {
        "node": "spark-b", "root": str(root), "name": "m", "revision": "r", "size": 8 * GIB, "weights": 8 * GIB,
        "config": facts(LLAMA_8B), "engine": {"max-model-len": 4096}, "ranks": 8,
    }  # fmt: skip
    with patch_module_args(arguments | changes), pytest.raises(SystemExit):
        model_fit.main()
    return json.loads(capsys.readouterr().out)


def test_the_module_refuses_a_disk_that_is_too_small_before_the_memory_is_judged(tmp_path, capsys):
    answer = fit(tmp_path / "models", capsys, size=1 << 60)
    assert answer["failed"]
    assert answer["msg"].startswith("spark-b: found ") and "GB free for" in answer["msg"] and "df -h" in answer["msg"]
    assert not (tmp_path / "models").exists()


def test_the_module_counts_what_is_there_already(tmp_path, capsys, monkeypatch):
    partial = tmp_path / "m" / ".partial-r"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(100_000))
    monkeypatch.setattr(
        model_fit, "require_space", lambda root, size: pytest.fail(str(size)) if size != 50_000 else None
    )
    assert not fit(tmp_path, capsys, size=150_000).get("failed")


@pytest.mark.parametrize("memory_check", [True, False])
def test_the_module_refuses_what_does_not_fit_unless_told_otherwise(tmp_path, capsys, memory_check):
    answer = fit(tmp_path, capsys, size=0, weights=1 << 60, memory_check=memory_check)
    assert bool(answer.get("failed")) == memory_check
    assert not memory_check or "-e model_memory_check=false skips this check" in answer["msg"]
