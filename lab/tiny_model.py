"""Write the lab's tiny language model: a Llama with random weights that a real vLLM loads and serves.

The model knows nothing. It exists so that the lab can drive the whole path of a real one: config, tokenizer,
chat template, safetensors, tensor parallel 2, streaming. Every byte is computed from a fixed seed with exact
arithmetic (no libm), so the folder is the same on every machine and its sha256 can be compared.

Two choices are worth knowing:

* ``head_dim`` is 32, not hidden/heads = 16, because vLLM's CPU attention takes no head smaller than 32.
* Residual channel 0 is a constant that no layer writes to, and the output head reads it as a bias: letters
  and the space get a high logit, every other byte and every special token a low one. So whatever is sampled
  is printable text, and a request runs to its ``max_tokens`` (the end token is as improbable as a control
  byte).

Run ``python3 lab/tiny_model.py FOLDER``. Standard library only.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

SEED = 20260731
SPECIALS = [f"<|{n}|>" for n in ("pad", "begin", "end", "system", "user", "assistant", "tool", "unused")]
VOCAB = 256 + len(SPECIALS)  # even, so that two ranks share it
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 4, 32
CONTEXT = 32768  # tokens; long prompts are what the fairness tests need
PAD, BEGIN, END = 256, 257, 258
PRINTABLE = " etaoinshrdlucmfwypvbgkjqxz"
"""What the model may say, the more probable first, so that the noise looks a little like words."""

Weights = tuple[tuple[int, ...], list[float]]
"""Shape and row-major values of a tensor."""

CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the 256 visible characters by which byte-level tokenizers write the bytes 0..255, in byte order.

    Bytes that are visible Latin-1 characters stand for themselves; the others are moved to U+0100 and up.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(b) if b in visible else chr(next(moved)) for b in range(256)]


def config() -> dict[str, Any]:
    """Return config.json of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }


def tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: one token per byte plus the special tokens, no merges."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": PAD + i, "content": t, "special": True, **flags} for i, t in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(byte_alphabet())}, "merges": []},
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD - 256],
        "bos_token": SPECIALS[BEGIN - 256],
        "eos_token": SPECIALS[END - 256],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def matrix(rng: random.Random, rows: int, columns: int, scale: float) -> Weights:
    """Return a matrix with values uniform in [-scale, scale)."""
    return (rows, columns), [(rng.random() * 2 - 1) * scale for _ in range(rows * columns)]


def into_residual(weights: Weights) -> Weights:
    """Return a projection (hidden, n) into the residual stream that leaves channel 0 alone."""
    (rows, columns), values = weights
    return (rows, columns), [0.0] * columns + values[columns:]


def with_channel_0(weights: Weights, channel: list[float]) -> Weights:
    """Return a per-token matrix (tokens, hidden) whose channel 0 has the given values, one per token."""
    (rows, columns), values = weights
    values = values.copy()
    values[::columns] = channel
    return (rows, columns), values


def tensors() -> dict[str, Weights]:
    """Return all weights by name."""
    rng = random.Random(SEED)
    inner, inner_kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    ones: Weights = ((HIDDEN,), [1.0] * HIDDEN)
    # Channel 0 is about 5 after the last norm, so a bias of +-3 puts some 30 between letters and the rest,
    # far beyond the random part (about +-2).
    bias = {ord(c): 3.2 - place / 100 for place, c in enumerate(PRINTABLE)}
    out: dict[str, Weights] = {
        "model.embed_tokens.weight": with_channel_0(matrix(rng, VOCAB, HIDDEN, 1.0), [4.0] * VOCAB),
        "lm_head.weight": with_channel_0(
            matrix(rng, VOCAB, HIDDEN, 0.25), [bias.get(token, -3.0) for token in range(VOCAB)]
        ),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        out |= {
            f"model.layers.{layer}.input_layernorm.weight": ones,
            f"model.layers.{layer}.post_attention_layernorm.weight": ones,
            f"{attention}.q_proj.weight": matrix(rng, inner, HIDDEN, 0.2),
            f"{attention}.k_proj.weight": matrix(rng, inner_kv, HIDDEN, 0.2),
            f"{attention}.v_proj.weight": matrix(rng, inner_kv, HIDDEN, 0.2),
            f"{attention}.o_proj.weight": into_residual(matrix(rng, HIDDEN, inner, 0.1)),
            f"{mlp}.gate_proj.weight": matrix(rng, INTERMEDIATE, HIDDEN, 0.2),
            f"{mlp}.up_proj.weight": matrix(rng, INTERMEDIATE, HIDDEN, 0.2),
            f"{mlp}.down_proj.weight": into_residual(matrix(rng, HIDDEN, INTERMEDIATE, 0.1)),
        }
    return out


def safetensors(weights: dict[str, Weights]) -> bytes:
    """Return the safetensors file (float32, little endian) of the given weights, by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (shape, values) in sorted(weights.items()):
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def build(folder: Path) -> Path:
    """Write the model into ``folder`` unless it is there; complete or absent. Return the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    texts = {
        "config.json": config(),
        "generation_config.json": {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in texts.items():
        (partial / name).write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="ascii")
    (partial / "model.safetensors").write_bytes(safetensors(tensors()))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tiny_model.py FOLDER")
    print(build(Path(sys.argv[1])))
