"""vLLM's own scheduler tests, from the source distribution of the installed release, with our hooks or without.

VENV/bin/python tests/scheduler/upstream.py VARIANT…     prints {variant: {test: outcome}} as the last line

VARIANT is `stock` (no hooks, alone), `off` (hooks, switched off), or a policy and a cap such as `fair/2`. The tests
that need a model from a hub fail here without hooks as with them: what counts is whether two variants differ.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "tests/scheduler")]

import patcher  # noqa: E402
import proof  # noqa: E402
from conftest import original  # noqa: E402

CACHE = ROOT / ".cache/vllm-tests"
SCHEDULER = "vllm.v1.core.sched.scheduler"
RUNTIME = "vllm.v1.core.sched.dspark_prefill"
TESTS = [f"tests/v1/core/test_{name}.py" for name in (
    "scheduler", "async_scheduler", "deferred_block_free", "mamba_align_chunk_split", "prefix_replay",
    "repetition_detection", "swa_inflight_window_free", "worker_slot_overflow",
)] + [f"tests/v1/kv_connector/unit/test_{name}.py" for name in (
    "kv_load_failure_recovery", "remote_prefill_lifecycle", "remote_decode_lifecycle", "invalid_blocks_correctness",
    "scheduler_kv_connector_override", "error_propagation", "cache_pollution_prevention",
)] + ["tests/v1/streaming_input/test_scheduler_streaming.py"]  # fmt: skip
# The model that the tests name is never loaded; they read its configuration.
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "word_embed_proj_dim": 768,
    "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272,
    "max_position_embeddings": 2048, "do_layer_norm_before": True, "torch_dtype": "float16",
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def fetch(release: str) -> Path:
    """A folder with the tests of ``release``, from its source distribution; kept in the cache."""
    folder = CACHE / release
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        # pip asks a source distribution for its metadata, which this one can tell only with these at hand.
        tools = ["setuptools<81", "setuptools-scm", "setuptools-rust", "wheel"]
        subprocess.run([*pip, "install", "--target", str(work / "tools"), *tools], check=True, capture_output=True)
        environ = {"PYTHONPATH": str(work / "tools"), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
        subprocess.run(
            [*pip, "download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", f"vllm=={release}"],
            env={**os.environ, **environ}, cwd=work, check=True,
        )  # fmt: skip
        (archive,) = work.glob("vllm-*.tar.gz")
        with tarfile.open(archive) as tar:
            # Python 3.11.2, Debian 12's, has no filters yet.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(work, [m for m in tar.getmembers() if "/tests/" in m.name])
        (made,) = work.glob("vllm-*/tests")
        (made / "conftest.py").unlink()  # it starts engines
        (made.parent / "pytest.ini").write_text("[pytest]\n", encoding="ascii")
        model = made.parent / "facebook/opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(OPT), encoding="ascii")
        made.parent.rename(folder)
    return folder


class Hooks(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports the installed scheduler with our hooks in it, and the module that they call."""

    def __init__(self) -> None:
        pass

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname == RUNTIME:
            return importlib.util.spec_from_file_location(fullname, ROOT / "patches" / patcher.MODULE)
        if fullname != SCHEDULER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        self.name, self.path = fullname, spec.origin
        spec.loader = self
        return spec

    def get_code(self, fullname: str) -> Any:
        return compile(patcher.patch(original(self.path), 0), self.path, "exec")


class Outcomes:
    """Collects how each test ended: the worst of its set-up, call and clean-up."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.split("/")[-1]
        if self.found.get(name, "passed") == "passed":
            self.found[name] = report.outcome


def run(variant: str) -> dict[str, str]:
    """Outcome by test of one run, in the current folder (that of :func:`fetch`)."""
    policy, _, cap = variant.partition("/")
    environ = {"DSPARK_PREFILL_HOTFIX_OFF": "1"}
    if cap:
        environ = {"DSPARK_PREFILL_POLICY": policy, "DSPARK_MAX_INFLIGHT_PREFILLS": cap}
    outcomes = Outcomes()
    with proof.settings(**environ):
        pytest.main(["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *TESTS], plugins=[outcomes])
    return outcomes.found


def main() -> None:
    variants = sys.argv[1:]
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if variants != ["stock"]:
        sys.meta_path.insert(0, Hooks())
    import vllm

    folder = fetch(vllm.__version__.split("+")[0])
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # the tests import each other as `tests.…`
    print("\n" + json.dumps({variant: run(variant) for variant in variants}))


if __name__ == "__main__":
    main()
