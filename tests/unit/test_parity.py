"""What nodes must share: one table, and which differences stop which stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from ansible.module_utils.sparkpair.node import GIB
from ansible.module_utils.sparkpair.node_check import check
from ansible.module_utils.sparkpair.parity import ROWS, cell, differences, sentences, table, torn
from conftest import ROOT

HEALTHY: dict[str, Any] = {
    **yaml.safe_load((ROOT / "tests/fixtures/known_bad.yml").read_text())["healthy"],
    "arch": "aarch64",
    "python": "3.12.3",
    "systemd": True,
    "uid": 1000,
    "users": {"sparkpair": 870},
    "groups": {"sparkpair": 870},
    "epoch": 1000.0,
    "disk_free": {},
    "memory_total": 121 * GIB,
}


def pair(path: str, value: Any) -> dict[str, Any]:
    """Two healthy nodes, the second with another value at `path`."""
    other = copy.deepcopy(HEALTHY)
    *parents, key = path.split(".")
    target = other
    for parent in parents:
        target = target[parent]
    for item in target if isinstance(target, list) else [target]:
        item[key] = value
    return {"spark-a": HEALTHY, "spark-b": other}


def judge(nodes: dict[str, Any], stage: str = "preflight", accepted: tuple[str, ...] = (), nccl: str = "") -> Any:
    return check({name: {"node": node} for name, node in nodes.items()}, {}, stage, {}, accepted, nccl, 1000.0)


def test_equal_nodes_have_no_table():
    nodes = {"spark-a": HEALTHY, "spark-b": copy.deepcopy(HEALTHY)}
    assert differences(nodes, "accept") == [] and table([]) == ""
    assert judge(nodes, "accept").faults == () and judge(nodes, "accept").warnings == ()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_every_row_is_named_with_both_values_and_what_mends_it(row):
    nodes = pair(row.path, {"sparkpair": 1} if row.path in ("users", "groups") else "9.9")
    (found,) = differences(nodes, "accept")
    assert (found.label, found.fatal) == (row.label, "accept" in row.fatal)
    text = table([found])
    assert row.label in text and row.mend in text and ("fatal" in text) == found.fatal
    assert ("9.9" in text or "sparkpair 1" in text) and cell(HEALTHY, row.path)[:20] in text
    verdict = judge(nodes, "accept")
    assert bool(verdict.faults) == found.fatal
    assert row.label in " ".join([*verdict.faults, *verdict.warnings])


def test_a_new_node_may_lack_what_the_run_installs_but_not_afterwards():
    nodes = pair("nccl.sha256", "")
    assert judge(nodes, "preflight").faults == ()
    (fault,) = judge(nodes, "gpu").faults
    assert fault.startswith("spark-b: found libnccl.so.2 nothing, expected aa as on spark-a: sudo apt-get install")


def test_an_accepted_row_is_shown_and_stops_nothing():
    verdict = judge(pair("driver.running", "580.159.03"), accepted=("driver",))
    assert len(verdict.faults) == 1 and "several versions" in verdict.faults[0]
    nodes = pair("driver", {"module": "580.159.03", "package": "580.159.03", "running": "580.159.03", "error": ""})
    assert judge(nodes).faults[0].startswith("spark-b: found driver 580.159.03, expected 580.142")
    assert judge(nodes, accepted=("driver",)).faults == ()


def test_clocks_are_compared_with_each_other():
    (found,) = differences(pair("epoch", 1007.5), "preflight")
    assert (found.label, found.fatal, found.shown) == ("clock", False, {"spark-a": "+0.0 s", "spark-b": "+7.5 s"})
    assert differences(pair("epoch", 1002.0), "preflight") == []


def test_a_torn_driver_names_all_three():
    (fault,) = torn("spark-b", {"module": "580.142", "package": "580.159.03", "running": ""})
    assert "module 580.142, package 580.159.03" in fault and "reboot" in fault
    assert torn("spark-b", {"module": "", "package": "", "running": "580.142"}) == []


def test_the_nccl_that_serves_must_be_there():
    nodes = {"spark-a": HEALTHY}
    assert judge(nodes, nccl="/usr/lib/aarch64-linux-gnu/libnccl.so.2").faults == ()
    (fault,) = judge(nodes, nccl="/usr/local/lib/libnccl.so.2").faults
    assert "gpu_nccl_path" in fault


def test_leftovers_are_reported():
    nodes = {"spark-a": {**HEALTHY, "leftovers": {"processes": ["41 VLLM::EngineCore"], "segments": 0, "bytes": 0}}}
    assert "sudo kill 41" in judge(nodes).warnings[0]
    nodes = {"spark-a": {**HEALTHY, "leftovers": {"processes": [], "segments": 3, "bytes": 5 * GIB}}}
    assert "3 shared-memory segments with 5.0 GiB" in judge(nodes).warnings[0]


def test_sentences_are_for_fatal_rows_only():
    assert sentences(differences(pair("dmi.bios_version", "old"), "accept")) == []
