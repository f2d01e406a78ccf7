"""The hooks on every release since 0.11.1, and the promises on those that run beside a 0.32 environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import patcher
import pytest
import releases

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = (ROOT / "patches/dspark_prefill.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("release", releases.RELEASES)
def test_fits_and_comes_out_again(release, tmp_path):
    source = (releases.fetch(release) / patcher.SCHED / "scheduler.py").read_bytes()
    folder = tmp_path / patcher.SCHED
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_bytes(source)
    installation = patcher.Installation(tmp_path, RUNTIME)
    assert installation.report().status == patcher.ORIGINAL
    assert installation.apply().report.status == patcher.PATCHED
    text = (folder / "scheduler.py").read_text(encoding="utf-8")
    compile(text, "scheduler.py", "exec")
    added = [line for line in text.splitlines() if line.endswith(patcher.TAG)]
    assert 20 <= len(added) <= 30
    installation.revert()
    assert (folder / "scheduler.py").read_bytes() == source
    assert [p.name for p in folder.iterdir()] == ["scheduler.py"]


@pytest.mark.parametrize("release", releases.RELEASES[::8])
def test_a_release_without_one_of_its_parts_is_refused(release, tmp_path):
    """Take out each line that a hook leans on in turn: the patcher must refuse, or the place was never needed."""
    source = (releases.fetch(release) / patcher.SCHED / "scheduler.py").read_text(encoding="utf-8")
    parts = {
        "peek_request()": "head()", "allocate_slots(": "reserve(", "lora_config": "adapters",
        "token_budget": "budget_left", "if new_blocks is None:": "if not new_blocks:", "def schedule(": "def plan(",
        "class Scheduler(": "class Planner(", "load_kv_async": "later", "num_scheduled_tokens": "given",
    }  # fmt: skip
    for old, new in parts.items():
        assert old in source
        with pytest.raises(patcher.Refused):
            patcher.patch(source.replace(old, new).encode(), 1)


@pytest.mark.slow
@pytest.mark.parametrize("release", releases.RUNNABLE)
def test_keeps_its_promises_on(release):
    site = releases.fetch(release, whole=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/scheduler/everywhere.py")],
        env={**os.environ, "PYTHONPATH": f"{site}:{releases.older_needs()}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith(release)
    assert found["problems"] == []
    assert found["short_ttft_ms"] <= 1000 and found["live_gap_ms"] <= 400
