"""The inventory check: what owners get wrong, each refused with a sentence that names the host and what to write."""

from __future__ import annotations

import pytest
from ansible.module_utils.sparkpair.inventory import check, owner
from conftest import ROOT
from inventory_check import load_specs

SPECS = load_specs(ROOT / "roles")
HOSTS = ["spark-a", "spark-b"]
GOOD = {
    "model_name": "tiny",
    "model_source": "/srv/model",
    "model_revision": "lab",
    "fabric_subnet": "192.168.176.0/23",
    "vllm_env_lock": "0.33.0-aarch64-cu130.txt",
}


def faults(settings=None, hosts=HOSTS, addresses=("10.77.0.1", "10.77.0.2")):
    return check("spark-a", hosts, {**GOOD, **(settings or {})}, SPECS, list(addresses))[0]


def test_a_good_inventory_has_no_fault_and_fills_in_defaults():
    found, values = check("spark-a", HOSTS, GOOD, SPECS, ["10.77.0.1", "10.77.0.2"])
    assert found == []
    assert values["serve_max_inflight_prefills"] == 2
    assert values["fabric_mtu"] == 9000


@pytest.mark.parametrize("cap", [0, 4, "two", "", "2.5", [1]])
def test_a_cap_that_is_not_1_to_3_is_refused(cap):
    assert any("serve_max_inflight_prefills" in fault for fault in faults({"serve_max_inflight_prefills": cap}))


@pytest.mark.parametrize("cap", [1, 2, 3, "3"])
def test_a_cap_from_1_to_3_passes(cap):
    assert faults({"serve_max_inflight_prefills": cap}) == []


def test_one_host_is_refused():
    (fault,) = faults(hosts=["spark-a"])
    assert "1 host" in fault and "at least 2" in fault


def test_three_hosts_with_two_ranks_are_refused():
    (fault,) = faults(hosts=["spark-a", "spark-b", "spark-c"], settings={"serve_tensor_parallel_size": 2})
    assert "3 hosts" in fault and "serve_tensor_parallel_size=2" in fault


def test_an_unknown_name_is_refused_with_the_near_one():
    (fault,) = faults({"serve_max_inflight_prefils": 2})
    assert "serve_max_inflight_prefils" in fault and "did you mean serve_max_inflight_prefills?" in fault


@pytest.mark.parametrize("mtu", [900, 1279, 9217, "big"])
def test_an_mtu_outside_the_range_is_refused(mtu):
    assert any("fabric_mtu" in fault for fault in faults({"fabric_mtu": mtu}))


@pytest.mark.parametrize(
    ("subnet", "words"),
    [
        ("10.77.0.0/23", "management address"),
        ("192.168.177.5/23", "is an address in a network"),
        ("nowhere", "is not a network"),
        ("", "is not a network"),
        ("192.168.176.0/24", "too small"),
    ],
)
def test_a_rail_subnet_that_cannot_work_is_refused(subnet, words):
    (fault,) = faults({"fabric_subnet": subnet})
    assert words in fault and fault.startswith("spark-a: ")


def test_a_host_name_as_management_address_is_left_to_the_node():
    assert faults(addresses=["spark-a.local", "spark-b.local"]) == []


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.1", "::", "127.0.0.1"])
def test_an_address_is_fine_with_and_without_a_key(bind):
    """Without one, the serve role makes a key for an open API."""
    assert faults({"serve_bind": bind}) == [] == faults({"serve_bind": bind, "serve_api_key": "set"})


def test_a_key_that_is_short_or_odd_is_refused():
    assert any("16 or more printable" in fault for fault in faults({"serve_api_key": "unusable"}))


def test_one_address_for_two_hosts_is_refused():
    assert any("10.77.0.1 on more than one host" in fault for fault in faults(addresses=["10.77.0.1", "10.77.0.1"]))


def test_a_bind_that_is_no_address_is_refused():
    assert any("serve_bind" in fault for fault in faults({"serve_bind": "everywhere"}))


@pytest.mark.parametrize("name", ["node-rank", "host", "port", "api-key", "master-addr", "nnodes"])
def test_options_that_the_role_derives_are_refused(name):
    assert any(name in fault for fault in faults({"serve_engine_args": {name: "x"}}))


@pytest.mark.parametrize("name", ["max_model_len", "--max-model-len", "Max-Len", ""])
def test_options_must_be_long_names_without_dashes(name):
    assert any("serve_engine_args" in fault for fault in faults({"serve_engine_args": {name: 1}}))


@pytest.mark.parametrize("value", ["", "a\nb", "tab\tbed"])
def test_a_variable_must_be_one_line_that_is_not_empty(value):
    assert any("NCCL_DEBUG" in fault for fault in faults({"serve_environment": {"NCCL_DEBUG": value}}))


@pytest.mark.parametrize("name", ["1A", "A-B", "DSPARK_MAX_INFLIGHT_PREFILLS", "VLLM_API_KEY"])
def test_variables_that_are_not_the_owners_to_set_are_refused(name):
    assert any(name in fault for fault in faults({"serve_environment": {name: "1"}}))


@pytest.mark.parametrize("port", [0, 80, 65536])
def test_a_port_outside_the_range_is_refused(port):
    assert any("serve_port" in fault for fault in faults({"serve_port": port}))


@pytest.mark.parametrize("tokens", [0, 63, 8193, "many"])
def test_an_allowance_outside_the_range_is_refused(tokens):
    assert any("serve_mixed_prefill_tokens" in fault for fault in faults({"serve_mixed_prefill_tokens": tokens}))


def test_one_port_for_two_uses_is_refused():
    assert any("a port of its own" in fault for fault in faults({"serve_port": 9000, "serve_master_port": 9000}))


def test_a_limited_run_is_refused():
    (fault,) = check("spark-b", HOSTS, GOOD, SPECS, [], ["spark-b"])[0]
    assert "leave --limit out" in fault
    assert check("spark-b", HOSTS, GOOD, SPECS, [], HOSTS)[0] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"model_name": "current"},
        {"model_name": ".hidden"},
        {"model_source": ""},
        {"model_source": "", "model_repo": "a/b", "model_revision": "main"},
        {"serve_uid": 0},
        {"serve_uid": -1},
        {"serve_user": "root"},
        {"serve_user": "a\nb"},
        {"verify_tokens": 0},
        {"serve_engine_args": {"dtype": None}},
        {"serve_engine_args": {"pipeline-parallel-size": 2}},
        {"serve_engine_args": {"ssl-keyfile": "/x"}},
        {"serve_engine_args": {"enable-prefix-caching": False}},
        {"serve_engine_args": {"enable-prefix-caching": True, "no-enable-prefix-caching": True}},
        {"serve_environment": {"A": None}},
        {"serve_environment": {"A": [1, 2]}},
        {"serve_environment": {"A": True}},
        {"serve_environment": {"NCCL_IB_HCA": "x"}},
    ],
)
def test_values_that_would_fail_late_are_refused_at_once(settings):
    assert len(faults(settings)) == 1


def test_the_longest_role_name_owns_a_variable():
    assert owner("vllm_env_lock", ["vllm", "vllm_env"]) == "vllm_env"
    assert owner("ansible_host", ["serve"]) is None


def test_a_rendezvous_that_the_firewall_leaves_open_is_refused():
    assert any("outside fabric_closed_ports" in fault for fault in faults({"serve_master_port": 26000}))
    assert faults({"serve_master_port": 26000, "fabric_closed_ports": [26000]}) == []
    assert faults({"serve_master_port": 26000, "fabric_firewall": False}) == []


def test_weights_are_not_copied_on_a_port_that_agents_use():
    (fault,) = faults({"model_port": 25001})
    assert "serve_agent_port=25001, model_port=25001, expected a port of its own for each" in fault
