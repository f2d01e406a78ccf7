"""The acceptance gate: every layer passes on a healthy pair, fails by its own code, and says what mends it."""

from __future__ import annotations

import copy
import json
from typing import Any

import accept_layer
import pytest
import yaml
from ansible.module_utils.sparkpair import accept
from ansible.module_utils.testing import patch_module_args
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

NAMES = ["spark-a", "spark-b"]
FACTS = yaml.safe_load((ROOT / "tests/fixtures/known_bad.yml").read_text())["healthy"]
NODE = {**FACTS, "rank_unit": {}, "uid": 1000, "users": {}, "groups": {}, "epoch": 1.0}
PORT = {"netdev": "enp1s0f0np0", "link_width": 4, "speed": 200000}
FABRIC = {"cage": "p0", "cages": {"p0": [PORT, {**PORT, "netdev": "enP2p1s0f0np0"}]}}
PING = {"paths": [{"payload": 8972}] * 2}
ROW = {"ok": True, "line": "spark-b -> spark-a  rail 0  ib_write_bw  107.0 Gb/s  healthy", "mend": ""}
RDMA = {"rows": [ROW, ROW]}
PASSED = {"name": "pass", "passed": True, "found": "23.74 GB/s over IB", "remedy": ""}
HEALTHY: dict[str, list[Any]] = {
    "link_width": [FABRIC, FABRIC],
    "link_speed": [FABRIC, FABRIC],
    "mtu": [PING, PING],
    "bandwidth": [{}, RDMA],
    "parity": [{"node": NODE}, {"node": NODE}],
    "known_bad": [{"known_bad": []}, {"known_bad": []}],
    "busbw": [{"arms": {"both": {"verdict": PASSED}}}, {}],
    "memory": [{"node": NODE}, {"node": NODE}],
}


def second(layer: str, **change: Any) -> list[Any]:
    """Healthy evidence of a layer with a change on the second node."""
    first, other = copy.deepcopy(HEALTHY[layer])
    return [first, {**other, **change}]


HIT = {
    "id": "x",
    "summary": "s",
    "severity": "fatal",
    "blocks": ["accept"],
    "remedy": "mend",
    "source": "y",
    "evidence": "e",
}
SLOW = {"ok": False, "line": "spark-b -> spark-a  rail 0  13.2 Gb/s  hot-plug fault", "mend": "unplug"}
FAILED = {"name": "two-worlds", "passed": False, "found": "two", "remedy": "build with MPI=1"}
BROKEN: dict[str, tuple[list[Any], str, str]] = {
    "link_width": (
        second("link_width", cages={"p0": [{**PORT, "link_width": 2}]}),
        "spark-b enp1s0f0np0 2",
        "fwupdmgr",
    ),
    "link_speed": (
        second("link_speed", cages={"p0": [{**PORT, "speed": 100000}]}),
        "spark-b enp1s0f0np0 100000",
        "200G-baseCR4",
    ),
    "mtu": (second("mtu", failed=True, msg="spark-b: rail 0: no answer"), "spark-b: rail 0", "fabric.yml"),
    "bandwidth": ([{}, {"rows": [ROW, SLOW]}], "13.2 Gb/s hot-plug fault", "unplug"),
    "parity": (
        second("parity", node={**NODE, "cuda": {"version": "12.8"}}),
        "spark-b: found cuda 12.8",
        "ansible-playbook site.yml",
    ),
    "known_bad": (second("known_bad", known_bad=[HIT]), "spark-b: s (e) [x]", "mend"),
    "busbw": ([{"arms": {"both": {"verdict": FAILED}}}, {}], "two-worlds", "MPI=1"),
    "memory": (
        second("memory", node={**NODE, "meminfo": {"MemTotal": 100, "MemAvailable": 50}}),
        "spark-b",
        "drop_caches",
    ),
}


def test_every_layer_has_its_own_code_and_a_judge():
    assert list(accept.JUDGES) == list(accept.LAYERS) == list(HEALTHY) == list(BROKEN)
    assert len(set(accept.LAYERS.values())) == len(accept.LAYERS)
    assert not set(accept.LAYERS.values()) & {0, 1, 2, 4}


@pytest.mark.parametrize("layer", accept.LAYERS)
def test_a_healthy_pair_passes(layer):
    assert accept.JUDGES[layer](NAMES, HEALTHY[layer], {}).status == "pass"


@pytest.mark.parametrize("layer", accept.LAYERS)
def test_a_layer_that_fails_says_where_and_what_mends_it(layer):
    evidence, found, remedy = BROKEN[layer]
    judged = accept.JUDGES[layer](NAMES, evidence, {})
    assert (judged.status, judged.code) == ("fail", accept.LAYERS[layer])
    assert found in judged.found and remedy in judged.remedy and judged.expected


@pytest.mark.parametrize("layer", accept.LAYERS)
def test_no_evidence_is_never_a_pass(layer):
    for evidence in ([{}, {}], [{"failed": True, "msg": "no"}] * 2, [{"unreachable": True}] * 2):
        assert accept.JUDGES[layer](NAMES, evidence, {}).status in ("fail", "skip")
    if layer not in ("bandwidth", "busbw"):
        assert accept.JUDGES[layer](NAMES, [{}, {}], {}).status == "fail"


def test_a_pair_that_serves_is_not_measured():
    judged = accept.busbw(NAMES, [{}, {}], {"serving": ["spark-a"]})
    assert judged.status == "fail" and "stop.yml" in judged.remedy


def test_a_serving_node_may_use_its_memory_but_no_orphan_may():
    busy = {"node": {**NODE, "rank_unit": {"active": 1}, "meminfo": {"MemTotal": 100, "MemAvailable": 1}}}
    assert accept.memory(NAMES, [busy, busy], {}).status == "pass"
    left = {"processes": ["41 VLLM::EngineCore"], "segments": 0, "bytes": 0}
    orphan = {"node": {**NODE, "leftovers": left}}
    assert "sudo kill 41" in accept.memory(NAMES, [HEALTHY["memory"][0], orphan], {}).remedy


def test_the_digest_changes_with_what_is_measured_and_with_nothing_else():
    digest = accept.inputs_digest(NODE, {"commit": "a"})
    for change in ({"kernel": "7"}, {"driver": {}}, {"nics": []}, {"nccl": {"sha256": "b"}}):
        assert accept.inputs_digest({**NODE, **change}, {"commit": "a"}) != digest
    for change in ({"epoch": 9.0}, {"nccl": {**NODE["nccl"], "wheel_sha256": "new"}}, {"meminfo": {}}):
        assert accept.inputs_digest({**NODE, **change}, {"commit": "a"}) == digest
    assert accept.inputs_digest(NODE, {"commit": "b"}) != digest


def run(capsys, **arguments):
    """The module's result."""
    with patch_module_args(arguments), pytest.raises(SystemExit):
        accept_layer.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_report_is_begun_goes_on_and_stops_at_the_first_failure(capsys, tmp_path):
    nodes = HEALTHY["parity"]
    begun = run(capsys, nodes=NAMES, evidence=nodes, report=str(tmp_path), kept=["", ""])
    assert begun["due"] and len(begun["digests"]) == 2
    reports = len(list(tmp_path.iterdir()))
    arguments = {"nodes": NAMES, "evidence": nodes, "kept": begun["digests"], "always": False}
    assert not run(capsys, **arguments, report=str(tmp_path))["due"] and len(list(tmp_path.iterdir())) == reports
    assert run(capsys, **{**arguments, "kept": ["", "x"]}, report=str(tmp_path / "due"))["due"]
    path = begun["report"]
    assert accept.main([path]) == 1
    assert run(capsys, layer="link_width", nodes=NAMES, evidence=HEALTHY["link_width"], report=path)["exit_code"] == 0
    assert accept.main([path]) == 0
    capsys.readouterr()
    failed = run(capsys, layer="mtu", nodes=NAMES, evidence=BROKEN["mtu"][0], report=path)
    assert failed["failed"] and failed["exit_code"] == 13
    assert all(word in failed["msg"] for word in ("found", "expected", "what mends it", "exit code 13", path))
    assert accept.main([path]) == 13
    assert "failed at mtu" in capsys.readouterr().out
    report = json.loads((tmp_path / path).read_text())
    assert [layer["layer"] for layer in report["layers"]] == ["link_width", "mtu"]
    assert "**What mends it:**" in (tmp_path / path).with_suffix(".md").read_text()


def test_a_check_writes_nothing(capsys, tmp_path):
    arguments = {
        "nodes": NAMES,
        "evidence": HEALTHY["parity"],
        "report": str(tmp_path / "r"),
        "_ansible_check_mode": True,
    }
    path = run(capsys, **arguments)["report"]
    judged = run(capsys, **{**arguments, "layer": "mtu", "evidence": HEALTHY["mtu"], "report": path})
    assert judged["status"] == "pass" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"exit_code": "x"}'])
def test_what_is_no_report_is_code_2(tmp_path, capsys, content):
    (tmp_path / "r.json").write_text(content)
    assert accept.main([str(tmp_path / "r.json")]) == 2
    assert accept.main([]) == 2


@given(st.sampled_from(list(accept.LAYERS)), st.text(max_size=30), st.text(max_size=30))
def test_any_words_fit_the_report(layer, found, remedy):
    report = accept.add(accept.new_report(NAMES, "now"), accept.Layer(layer, "fail", found, "x", remedy))
    table = [line for line in accept.markdown(report).split("\n") if line.startswith(f"| {layer} ")]
    assert len(table) == 1 and report["exit_code"] == accept.LAYERS[layer]
