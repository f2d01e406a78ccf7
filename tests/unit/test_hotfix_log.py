"""Reading back what the hotfix logs."""

from __future__ import annotations

import logging

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
    found = hotfix_log.summary([record])
    assert (found["steps"], found["max_partial"], found["decode_skips"]) == (1, 1, 1)
    assert hotfix_log.steps([*lines, "[issue43-step 3] {half a li"]) == [record]


def test_the_last_construction_counts():
    line = "vllm[7]: [issue27-hotfix] in-flight prefill cap={} policy=fair diag=0 revision=3 allowance=512"
    found = hotfix_log.built(["x", line.format(1), line.format(2), "y"])
    assert found == {"cap": 2, "policy": "fair", "diag": 0, "revision": 3, "allowance": 512}
    strict = "[issue27-hotfix] in-flight prefill cap=1 policy=strict diag=1 revision=3"
    assert hotfix_log.built([strict]) == {"cap": 1, "policy": "strict", "diag": 1, "revision": 3, "allowance": None}
    assert hotfix_log.built([strict, "[issue27-hotfix] off: DSPARK_PREFILL_HOTFIX_OFF is set"]) == {"off": True}
    assert hotfix_log.built(["nothing"]) is None
    assert runtime.REVISION == 3, "the lines above say what this revision logs"
