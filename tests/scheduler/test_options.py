"""What the installed vLLM says against options, asked as the serve role asks it before anything restarts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = ["--node-rank", "0"]
BASE = {
    "served-model-name": "tiny", "tensor-parallel-size": 2, "distributed-executor-backend": "mp", "nnodes": 2,
    "master-addr": "192.168.176.1", "master-port": 25000, "max-model-len": 32768, "dtype": "float32",
    "enforce-eager": True,
}  # fmt: skip


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_options = load(ROOT / "roles/serve/files/check_options.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    load(ROOT / "lab/tiny_model.py").build(folder)
    return str(folder)


def refusal(model: str, tmp_path: Path, **options: object) -> str:
    engine = tmp_path / "engine.yaml"
    # JSON is YAML too.
    engine.write_text(json.dumps({**BASE, **{name.replace("_", "-"): value for name, value in options.items()}}))
    return check_options.refusal(str(engine), model, TOPOLOGY)


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 512}, {"max_num_batched_tokens": 4096}])
def test_options_that_fit_are_taken(model, tmp_path, options):
    assert refusal(model, tmp_path, **options) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_modle_len": 3}, "max-modle-len"),
        ({"max_model_len": "many"}, "max-model-len"),
        ({"kv_cache_dtype": "fp3"}, "kv-cache-dtype"),
        # Each is fine alone.
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_seqs"),
        ({"no_enable_chunked_prefill": True, "max_num_batched_tokens": 4096}, "max_model_len"),
        ({"long_prefill_token_threshold": 40000}, "long_prefill_token_threshold"),
    ],
)
def test_unknown_wrong_and_conflicting_options_are_refused_by_name(model, tmp_path, options, words):
    assert words in refusal(model, tmp_path, **options)


@pytest.mark.parametrize("options", [{"max_num_partial_prefills": 2}, {"max_long_partial_prefills": 1}])
def test_the_stock_partial_prefill_options_are_refused_where_this_vllm_cannot_do_them(model, tmp_path, options):
    """0.32 does not know them any more; older releases with the v1 engine refuse values above 1."""
    assert refusal(model, tmp_path, **options)
