"""Reading back what the hotfix logs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import hotfix_log
from ansible.module_utils.sparkpair import hotfix_runtime as runtime

from tests.unit.test_hotfix_runtime import LANE, LONG, fair_gate, gate, request


@pytest.mark.parametrize("policy", ["strict", "fair"])
def test_reads_what_the_gate_writes(caplog, policy):
    make = {"strict": gate, "fair": fair_gate}[policy]
    with caplog.at_level(logging.INFO):
        g = make([LONG, LANE], [], cap=1)
        g.settings.diag = True
        g.begin()
        scheduled = {"long": min(g.clip(LONG, 600, 600), 512)}
        g.before_lookup(request("held", 9), scheduled)
        g.end(scheduled)
    lines = [f"Nov 30 21:00:00 spark-a vllm[1]: INFO {r.message}" for r in caplog.records]
    (record,) = hotfix_log.steps(lines)
    assert record["prefill"] == {"long": 512}
    assert record["decode_skips"] == {"lane": {"position": 1, "run": 1}}
    assert ({"allowance", "boost", "share", "used", "want", "credit"} <= set(record)) == (policy == "fair")
    assert hotfix_log.summary([record]) == {
        "steps": 1, "max_partial": 1, "max_mixed_prefill": 0, "decode_skips": 1, "longest_skip": 1,
        "held": {"cap": 1} if policy == "strict" else {}, "oldest_hold": 0, "exempt": {}, "overcounted": 0,
    }  # fmt: skip
    assert hotfix_log.steps([*lines, "[issue43-step 3] {half a li"]) == [record]


ENGINE = "threshold=1024 budget=8192"


def test_the_last_construction_counts():
    options = {"threshold": 1024, "budget": 8192}
    line = "vllm[7]: [issue27-hotfix] in-flight prefill cap={} policy=fair diag=0 revision=4 {} allowance=512"
    found = hotfix_log.built(["x", line.format(1, ENGINE), line.format(2, ENGINE), "y"])
    assert found == {"cap": 2, "policy": "fair", "diag": 0, "revision": 4, "allowance": 512} | options
    strict = f"[issue27-hotfix] in-flight prefill cap=1 policy=strict diag=1 revision=4 {ENGINE}"
    wanted = {"cap": 1, "policy": "strict", "diag": 1, "revision": 4, "allowance": None} | options
    assert hotfix_log.built([strict]) == wanted
    assert hotfix_log.built([strict, "[issue27-hotfix] off: DSPARK_PREFILL_HOTFIX_OFF is set"]) is None
    assert hotfix_log.built(["nothing"]) is None
    assert runtime.REVISION == 4, "the lines above say what this revision logs"


def test_as_a_filter_of_a_journal():
    record = {
        "partial": 2, "prefill": {"a": 512}, "decode": {"b": 1}, "held": {"c": "cap", "d": "cap"}, "oldest_hold": 7,
        "exempt": {"e": "preempted"}, "decode_skips": {}, "overcounted": [],
    }  # fmt: skip
    line = f"INFO [issue27-hotfix] in-flight prefill cap=2 policy=strict diag=1 revision=4 {ENGINE}"
    done = subprocess.run(
        [sys.executable, "-I", str(Path(hotfix_log.__file__).resolve())],
        input=f"{line}\nnoise\n[issue43-step 9] {json.dumps(record)}\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["built"]["cap"] == 2
    assert (found["max_mixed_prefill"], found["held"], found["oldest_hold"]) == (512, {"cap": 2}, 7)
