"""Resolving at start on kernel-shaped trees: devices, GID indexes, NCCL's selector grammar, one status a failure."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import resolve
from ansible.module_utils.sparkpair.resolve import (
    BAD_SELECTOR,
    NO_ADDRESS,
    NO_DEVICE,
    NO_GID,
    NO_INTERFACE,
    USAGE,
    Device,
    Plan,
    ResolveError,
    parse_selector,
    read_devices,
    read_plan,
    render,
    wait_and_resolve,
)
from sparkpair_rank.processes import NOISE, find_cause

from lab.simulated_rdma import gid_of_ipv4, spark_ports, write, write_hca

A = ("192.168.176.1", "192.168.177.1")
PLAN = Plan(addresses=A, host=A[0], subnet="192.168.176.0/23", wait_seconds=0)


def addresses(cage="0"):
    return {
        "lo": ["127.0.0.1"],
        "enP7s7": ["10.77.0.1"],
        f"enp1s0f{cage}np{cage}": [A[0]],
        f"enP2p1s0f{cage}np{cage}": [A[1]],
    }


@pytest.fixture
def tree(tmp_path):
    """Write ports as sysfs shows them and read them back: `tree(ports, addresses)`."""

    def read(ports, known):
        for port in ports:
            write_hca(tmp_path, port)
            device = tmp_path / "devices" / port.pci / "net" / port.netdev
            device.mkdir(parents=True, exist_ok=True)
        return read_devices(tmp_path, known)

    read.root = tmp_path
    return read


def move_gid(root, hca, index, address, netdev):
    """Give a device one more pair of GID slots, v1 at `index` - 1 and v2 at `index`."""
    port = root / "class/infiniband" / hca / "ports/1"
    for slot, kind in ((index - 1, "IB/RoCE v1"), (index, "RoCE v2")):
        write(port / "gids" / str(slot), gid_of_ipv4(address))
        write(port / "gid_attrs/types" / str(slot), kind)
        write(port / "gid_attrs/ndevs" / str(slot), netdev)


@pytest.mark.parametrize("cage", ["0", "1"])
def test_one_cable_chooses_its_two_devices_and_no_index(tree, cage):  # S1
    known = addresses(cage)
    devices = tree(spark_ports(0, cabled=f"p{cage}"), known)
    assert resolve.resolve(PLAN, known, devices) == {
        "VLLM_HOST_IP": "192.168.176.1",
        "GLOO_SOCKET_IFNAME": f"enp1s0f{cage}np{cage}",
        "NCCL_SOCKET_IFNAME": f"=enp1s0f{cage}np{cage}",
        "NCCL_IB_HCA": f"=rocep1s0f{cage}:1,roceP2p1s0f{cage}:1",
    }


def test_devices_come_in_the_order_of_the_rails_whatever_the_order_of_the_tree(tree):  # S23
    known = addresses()
    devices = tree(list(reversed(spark_ports(0))), known)
    assert resolve.resolve(PLAN, known, devices)["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1"
    assert resolve.resolve(PLAN, known, devices[::-1])["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1"
    swapped = replace(PLAN, addresses=A[::-1], host=A[1])
    assert resolve.resolve(swapped, known, devices)["NCCL_IB_HCA"] == "=roceP2p1s0f0:1,rocep1s0f0:1"


def test_a_tree_without_devices_is_no_cable(tree):  # S2
    with pytest.raises(ResolveError, match="without a cable the ConnectX-7 leaves the PCI bus") as error:
        resolve.resolve(PLAN, addresses(), tree([], addresses()))
    assert error.value.status == NO_DEVICE


def test_in_a_ring_ranks_meet_at_the_address_that_all_of_them_reach(tree):
    known = {**addresses(), "wan0": ["10.77.0.9"]}
    ring = replace(PLAN, host="10.77.0.1", environment={"NCCL_IB_MERGE_NICS": "0"})
    found = resolve.resolve(ring, known, tree(spark_ports(0), known))
    assert found["VLLM_HOST_IP"] == "10.77.0.1" and found["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert found["NCCL_SOCKET_IFNAME"] == "=enP7s7" and found["NCCL_IB_MERGE_NICS"] == "0"
    assert found["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1"


def test_an_unaddressed_twin(tree):  # S3
    known = {**addresses(), "enP2p1s0f0np0": []}
    with pytest.raises(ResolveError, match=r"no interface has the address 192\.168\.177\.1 .*fabric\.yml") as error:
        resolve.resolve(PLAN, known, tree(spark_ports(0), known))
    assert error.value.status == NO_ADDRESS


def test_a_twin_whose_gid_is_of_another_address(tree):  # S3, the stale GID of an address that is gone
    ports = [replace(p, addresses=("192.168.177.9",)) if p.hca == "roceP2p1s0f0" else p for p in spark_ports(0)]
    with pytest.raises(ResolveError, match=r"roceP2p1s0f0 has no RoCE v2 GID of an IPv4 address") as error:
        resolve.resolve(PLAN, addresses(), tree(ports, addresses()))
    assert error.value.status == NO_GID


def test_an_address_on_two_interfaces(tree):
    known = {**addresses(), "enp1s0f1np1": [A[0]]}
    with pytest.raises(ResolveError, match="enp1s0f0np0 and enp1s0f1np1 all have") as error:
        resolve.resolve(PLAN, known, tree(spark_ports(0), known))
    assert error.value.status == NO_INTERFACE


def test_other_addresses_on_a_rail_are_kept_out_of_nccls_choice(tree):
    known = {**addresses(), "enp1s0f0np0": [A[0], "192.168.100.10"]}
    tree(spark_ports(0), known)
    move_gid(tree.root, "rocep1s0f0", 5, "192.168.100.10", "enp1s0f0np0")
    found = resolve.resolve(PLAN, known, read_devices(tree.root, known))
    assert found["NCCL_IB_ADDR_RANGE"] == "192.168.176.0/23"


def test_a_rail_whose_port_is_down(tree):
    ports = [replace(p, carrier="0") if p.hca == "roceP2p1s0f0" else p for p in spark_ports(0)]
    with pytest.raises(ResolveError, match="no active RDMA port on enP2p1s0f0np0") as error:
        resolve.resolve(PLAN, addresses(), tree(ports, addresses()))
    assert error.value.status == NO_DEVICE


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ("", "rocep1s0f0:1 rocep1s0f1:1 roceP2p1s0f0:1 roceP2p1s0f1:1"),
        ("roce", "rocep1s0f0:1 rocep1s0f1:1 roceP2p1s0f0:1 roceP2p1s0f1:1"),
        ("rocep1s0f1", "rocep1s0f1:1"),
        ("rocep", "rocep1s0f0:1 rocep1s0f1:1"),
        ("=roce", ""),
        ("=rocep1s0f0,roceP2p1s0f0", "rocep1s0f0:1 roceP2p1s0f0:1"),
        ("^rocep1s0f1,roceP2p1s0f1", "rocep1s0f0:1 roceP2p1s0f0:1"),
        ("^=rocep1s0f1", "rocep1s0f0:1 roceP2p1s0f0:1 roceP2p1s0f1:1"),
        ("=^rocep1s0f0", ""),
        ("rocep1s0f0:1", "rocep1s0f0:1"),
        ("rocep1s0f0:2", ""),
        ("rocep1s0f0:", "rocep1s0f0:1"),
        ("rocep1s0f0:1:0:3,roceP2p1s0f0:1:1", "rocep1s0f0:1 roceP2p1s0f0:1"),
        ("rocep1s0f0: +1x", "rocep1s0f0:1"),
        ("rocep1s0f0:x", ""),
        ("rocep1s0f0:-1", "rocep1s0f0:1"),
        ("rocep1s0f0:4294967295", ""),
        (":1,rocep1s0f0,,", "rocep1s0f0:1"),
        (" rocep1s0f0", ""),
        ("Rocep1s0f0", ""),
    ],
)
def test_the_selector_is_read_as_nccl_reads_it(selector, fits):
    parsed = parse_selector(selector)
    names = ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"]
    assert [f"{name}:1" for name in names if parsed.fits(name, 1)] == fits.split()


@pytest.mark.parametrize("selector", ["^", "=", "^=", ",", ":1"])
def test_a_selector_that_names_nothing_is_refused(selector):
    with pytest.raises(ResolveError) as error:
        parse_selector(selector)
    assert error.value.status == BAD_SELECTOR


def test_names_and_lists_are_cut_where_nccl_cuts_them():
    parsed = parse_selector("=" + ",".join(["x" * 80] + [f"mlx{n}" for n in range(40)]))
    assert len(parsed.entries) == 32 and parsed.entries[0][0] == "x" * 63


def test_a_selector_of_the_inventory_wins_and_down_ports_are_passed_over(tree):
    devices = tree(spark_ports(0), addresses())
    found = resolve.resolve(replace(PLAN, hca="roce"), addresses(), devices)
    assert found["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1"
    with pytest.raises(ResolveError, match=r"'=roce' fits none of the RDMA devices \(roceP2p1s0f0:1 active"):
        resolve.resolve(replace(PLAN, hca="=roce"), addresses(), devices)


def test_what_comes_late_after_a_boot_is_waited_for(tree, capsys):
    tree(spark_ports(0), addresses())
    answers = [{"lo": ["127.0.0.1"]}, {"lo": ["127.0.0.1"]}, addresses()]
    plan = replace(PLAN, wait_seconds=60, sysfs_root=str(tree.root))
    found, devices = wait_and_resolve(plan, lambda: answers.pop(0), pause=0)
    assert found["VLLM_HOST_IP"] == A[0] and len(devices) == 4 and not answers
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("sparkpair: waiting for the fabric, up to 60 s: no interface has")


def test_the_file_has_no_empty_variable_and_quotes_for_systemd():
    assert render({"A": 'x "y" \\z', "NCCL_IB_GID_INDEX": "", "B": "1"}) == 'A="x \\"y\\" \\\\z"\nB="1"\n'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"addresses": [], "host": "1.0.0.1", "subnet": "192.168.176.0/23"}',
     '{"addresses": ["x"], "host": "1.0.0.1", "subnet": "1.0.0.0/8"}',
     '{"addresses": ["1.0.0.1"], "subnet": "1.0.0.0/8"}',
     '{"addresses": ["1.0.0.1"], "host": "1.0.0.1", "subnet": "1.0.0.0/8", "unknown": 1}',
     '{"addresses": ["1.0.0.1"], "host": "1.0.0.1", "subnet": "x"}'],
)  # fmt: skip
def test_a_plan_that_cannot_be_read_is_refused(text):
    with pytest.raises(ResolveError) as error:
        read_plan(text)
    assert error.value.status == USAGE


@pytest.mark.parametrize(("known", "status"), [(addresses(), 0), ({"lo": ["127.0.0.1"]}, NO_ADDRESS)])
def test_the_program_becomes_the_command_with_what_it_found_or_leaves_the_old_file(tree, tmp_path, known, status):
    tree(spark_ports(0), known)
    commands = tmp_path / "bin"
    commands.mkdir()
    listing = [
        {"ifname": name, "addr_info": [{"family": "inet", "local": a, "prefixlen": 24} for a in here]}
        for name, here in known.items()
    ]
    (commands / "ip").write_text(f"#!/bin/sh\necho '{json.dumps(listing)}'\n")
    (commands / "ip").chmod(0o755)
    plan, output = tmp_path / "plan.json", tmp_path / "fabric.env"
    output.write_text("OLD=1\n")
    settings = {
        "addresses": A,
        "host": A[0],
        "subnet": "192.168.176.0/23",
        "wait_seconds": 0,
        "sysfs_root": str(tmp_path),
    }
    plan.write_text(json.dumps({**settings, "environment": {"NCCL_IB_MERGE_NICS": "0"}}))
    done = subprocess.run(
        [sys.executable, "-I", resolve.__file__, plan, output, "sh", "-c", "echo $KEPT $NCCL_IB_HCA; exit 7"],
        env={"PATH": f"{commands}:/usr/bin:/bin", "KEPT": "kept"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if status:
        assert done.returncode == status, done.stderr
        assert output.read_text() == "OLD=1\n" and "no interface has the address" in done.stderr
        cause = find_cause([(1.0, done.stderr.strip())], 0.0)
        assert cause is not None and cause.weight == 0 and cause.text.endswith("(exit status 11)")
    else:
        assert done.returncode == 7, done.stderr
        assert done.stdout.splitlines()[1:] == ["kept =rocep1s0f0:1,roceP2p1s0f0:1"]
        assert 'NCCL_IB_HCA="=rocep1s0f0:1,roceP2p1s0f0:1"' in output.read_text()
        assert 'NCCL_IB_MERGE_NICS="0"' in output.read_text()
        assert "{3: '192.168.176.1'}" in done.stdout


def test_the_agent_takes_none_of_the_sentences_for_the_noise_of_a_lost_rank():
    calls = [n for n in ast.walk(ast.parse(Path(resolve.__file__).read_text())) if isinstance(n, ast.Call)]
    raised = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ResolveError"]
    texts = [str(n.value) for call in raised for n in ast.walk(call.args[1]) if isinstance(n, ast.Constant)]
    assert len(raised) >= 8 and not [text for text in texts if NOISE.search(text)]


def test_infiniband_ports_of_other_kinds_are_passed_over(tree):
    devices = tree(spark_ports(0), addresses())
    write(tree.root / "class/infiniband/rocep1s0f1/ports/1/link_layer", "Unspecified")
    assert len(read_devices(tree.root, addresses())) == len(devices) - 1
    assert Device("rocep1s0f0", 1, True, "enp1s0f0np0", {3: A[0]}) in devices
