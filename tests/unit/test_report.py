"""The table of the pair and its verdict."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from ansible.module_utils.sparkpair.report import Wish, faults_of, table

WANT = {"DSPARK_MAX_INFLIGHT_PREFILLS": "2", "DSPARK_PREFILL_POLICY": "fair"}
ENGINE = {"long-prefill-token-threshold": 512, "max-num-batched-tokens": "4096", "dtype": "float32"}
WISH = Wish(WANT, patched=True, play="ansible-playbook -i inventory/mine", api="127.0.0.1:8000", engine=ENGINE)


def node(rank):
    return {
        "fabric": {"cage": "p0", "rails": [{"netdev": "enp1s0f0np0", "addresses": ["192.168.176.1/24"], "mtu": 9000,
                                           "addresses_by_rank": ["192.168.176.1", "192.168.176.2"]}]},
        "rank_info": {
            "unit": {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled",
                     "NRestarts": "0"},
            "processes": [{"pid": 7, "name": "vllm", "env": dict(WANT)}],
            "scheduler": {"cap": 2, "policy": "fair", "threshold": 512, "budget": 4096} if rank == 0 else None,
            "system": "ubuntu 24.04 7.5.0 6.17", "packages": {"libnccl2": "2.28.9-1"}, "vllm": "0.33.0",
            "agent": {"serving": True, "text": "generation 1: serving"}, "closed_ports": [25000, 25001],
            "listeners": ["127.0.0.1:8000", "192.168.176.1:25001", ":::25000"],
            "digests": {"env": "abc", "scheduler": "def", "model": "tiny/lab"},
        },
        "hotfix": {"found": {"status": "patched", "digest": "0123456789abcdef"}},
        "completion": {"completion": {"chunks": 8, "first_token_s": 0.12}} if rank == 0 else {},
    }  # fmt: skip


@pytest.fixture
def pair():
    return {"spark-a": node(0), "spark-b": node(1)}


def test_a_serving_pair_is_proven(pair):
    faults = faults_of(pair, WISH)
    assert faults == []
    shown = table(pair, faults)
    assert (
        shown.startswith("sparkpair: serving, proven") and "8 chunks streamed" in shown and "spark-b (rank 1)" in shown
    )


def change(pair, name, path, value):
    changed = copy.deepcopy(pair)
    *folders, last = path.split("/")
    target = changed[name]
    for folder in folders:
        target = target[folder]
    target[last] = value
    return changed


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("spark-b", "rank_info/unit/ActiveState", "failed", "rank failed"),
        ("spark-b", "rank_info/processes", [], "no process"),
        ("spark-b", "rank_info/agent", {"serving": False, "text": "held on spark-b: x"}, "held on spark-b: x"),
        ("spark-b", "rank_info/listeners", ["0.0.0.0:8000"], "listening on 0.0.0.0:8000"),
        ("spark-a", "rank_info/closed_ports", [], "listening on :::25000"),
        ("spark-b", "rank_info/processes", [{"pid": 9, "name": "w", "env": {}}], "<unset>"),
        ("spark-b", "rank_info/digests/model", "tiny/other", "model"),
        ("spark-b", "rank_info/vllm", "0.32.0", "vllm_env"),
        ("spark-b", "rank_info", {"unreachable": True}, "unreachable"),
        ("spark-b", "hotfix/found/status", "original", "scheduler original"),
        ("spark-a", "rank_info/scheduler", None, "did not log its cap"),
        ("spark-a", "rank_info/scheduler/cap", 1, "cap 1"),
        ("spark-a", "rank_info/scheduler/policy", "strict", "policy strict"),
        ("spark-a", "rank_info/scheduler/threshold", 0, "threshold 0 in the running scheduler, expected 512"),
        ("spark-a", "rank_info/scheduler/budget", 2048, "budget 2048"),
        ("spark-a", "completion", {"failed": True, "msg": "no answer within 5 s"}, "no answer"),
        ("spark-b", "completion", {"failed": True, "msg": "/metrics from here: HTTP 200"}, "/metrics from here"),
    ],
)
def test_what_is_not_proven_is_named(pair, name, path, value, words):
    faults = faults_of(change(pair, name, path, value), WISH)
    assert any(words in fault and fault.startswith(f"{name}: ") for fault in faults), faults


def test_drift_is_marked_in_the_table(pair):
    drifted = change(pair, "spark-b", "rank_info/packages", {"libnccl2": "2.30.4-1"})
    assert "gpu ≠" in table(drifted, faults_of(drifted, WISH))


def test_an_unpatched_pair_is_fine_when_the_hotfix_is_not_asked_for(pair):
    stock = change(
        change(pair, "spark-a", "hotfix/found/status", "original"), "spark-b", "hotfix/found/status", "original"
    )
    assert faults_of(change(stock, "spark-a", "rank_info/scheduler", None), Wish(WANT, patched=False)) == []


def test_an_earlier_hotfix_is_fine_after_a_rollback_alone(pair):
    old = change(pair, "spark-a", "hotfix/found/status", "patched-older")
    assert any("patched-older" in fault for fault in faults_of(old, WISH))
    assert not any("patched-older, expected" in fault for fault in faults_of(old, replace(WISH, older=True)))


def test_a_patched_pair_is_a_fault_when_the_hotfix_is_to_be_out(pair):
    assert any("found the scheduler patched" in fault for fault in faults_of(pair, Wish(WANT, patched=False)))


def test_a_check_shows_the_pair_and_judges_nothing(pair):
    shown = table(change(pair, "spark-b", "rank_info/unit/ActiveState", "failed"), ["x"], checking=True)
    assert "as it is now" in shown and "NOT PROVEN" not in shown and "failed" in shown


def test_sentences_name_the_owners_inventory(pair):
    faults = faults_of(change(pair, "spark-b", "rank_info/digests/model", "tiny/other"), WISH)
    assert any("ansible-playbook -i inventory/mine site.yml" in fault for fault in faults)


def test_nodes_that_could_not_be_read_still_make_a_table():
    shown = table({"spark-a": {}, "spark-b": {"rank_info": {"unreachable": True}}}, ["spark-b: unreachable"])
    assert "NOT PROVEN" in shown and "unreachable" in shown and "not read" in shown
