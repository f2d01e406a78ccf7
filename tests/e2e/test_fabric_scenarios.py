"""The fabric on two and three lab nodes in every state that owners bring: one lab, a scenario after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
import yaml
from fabric_lab import NAME, NODES, RAILS, STATE, addressed, ip, picture, root, wait
from test_demo import changed, lab, make_inventory, play, recap

pytestmark = pytest.mark.usefixtures("own_lab")
OTHER = ("enp1s0f1np1", "enP2p1s0f1np1")
MODULE_RUNS = 6
"""Most module runs of a converged run on one host."""
FEW = ("-e", "fabric_ping_timeout=2")


NO_PROOF = ("-e", "fabric_prove_bandwidth=never")
"""Bandwidth has a test of its own."""


def words(output: str) -> str:
    return " ".join(output.split())


def fabric(*arguments: str, check: bool = True, **variables: str) -> str:
    return play("playbooks/fabric.yml", *NO_PROOF, *arguments, check=check, **variables)


def park(*command: str) -> None:
    """`ip` on the far ends of the cables that lead nowhere."""
    subprocess.run(["ip", "-n", f"{NAME}-park", *command], check=True)


@pytest.fixture
def untouched():
    """Whatever the scenario is, both nodes are afterwards as they were before the first run."""
    before = {node: picture(node) for node in NODES}
    yield
    fabric("-e", "fabric_state=absent")
    assert {node: picture(node) for node in NODES} == before


LISTEN = "import socket; s = socket.create_server(('', {})); [s.accept() for _ in range(9)]"


def test_a_converged_run_is_short_and_the_firewall_lets_the_peer_in_alone(untouched):
    assert changed(fabric()) == {1}
    root("spark-a", f'nohup timeout 20 python3 -c "{LISTEN.format(25000)}" >/dev/null 2>&1 & sleep 0.5')
    connect = "timeout 2 bash -c '</dev/tcp/{}/25000' && echo open || echo closed"
    found = {a: root("spark-b", connect.format(a)).strip() for a in ("192.168.176.1", "spark-a-rail1", "10.77.0.1")}
    assert found == {"192.168.176.1": "open", "spark-a-rail1": "open", "10.77.0.1": "closed"}
    # The kernel answers for a rail's address on the management network too, if nobody stops it.
    root("spark-b", "ip route add 192.168.176.1/32 via 10.77.0.1 dev enP7s7")
    assert root("spark-b", "ping -c 1 -W 1 192.168.176.1 >/dev/null && echo open || echo closed") == "closed\n"
    root("spark-b", "ip route del 192.168.176.1/32 via 10.77.0.1 dev enP7s7")
    root("spark-a", "nft delete table inet sparkpair")
    output = fabric()
    assert recap(output)["spark-a"]["changed"] == 1 and recap(output)["spark-b"]["changed"] == 0
    assert "dport" in root("spark-a", "nft list table inet sparkpair")
    assert recap(output)["spark-b"]["ok"] <= MODULE_RUNS


UFW = """
ufw --force enable
ufw default deny incoming
ufw allow in on enP7s7
"""


def test_the_bandwidth_is_measured_and_reported(untouched, tmp_path):
    report = tmp_path / "fabric.json"
    output = fabric("-e", "fabric_prove_bandwidth=changed", "-e", f"fabric_report={report}")
    assert re.search(r"spark-b -> spark-a  both rails  iperf3 +[\d.]+ Gb/s  TCP stand-in", output), output[-3000:]
    rows = json.loads(report.read_text())["fabric"]
    ways = ("spark-b -> spark-a", "spark-a -> spark-b")
    assert sorted((row["peer"], row["rail"]) for row in rows) == sorted((w, r) for w in ways for r in ("0", "1", "all"))
    assert all((row["tool"], row["ok"]) == ("iperf3", True) for row in rows)
    assert all(row["gbps"] > 0.1 for row in rows)
    assert "bandwidth" not in root("spark-a", "systemctl list-units --all --plain")
    assert "Measure" not in fabric("-e", "fabric_prove_bandwidth=changed")


def test_an_active_ufw_lets_the_rails_in():
    root("spark-b", UFW)
    try:
        before = root("spark-b", "cat /etc/ufw/*.rules")
        fabric()
        assert all(f"Anywhere on {rail}" in root("spark-b", "ufw status") for rail in RAILS)
        fabric("-e", "fabric_state=absent")
        assert root("spark-b", "cat /etc/ufw/*.rules") == before
    finally:
        root("spark-b", "ufw --force disable; nft flush ruleset")


def test_a_plan_of_somebody_else_is_refused_by_its_name(untouched):
    root("spark-b", "printf 'network: {ethernets: {enP2p1s0f0np0: {dhcp4: true}}}' >/etc/netplan/40-cx7.yaml")
    output = words(fabric(check=False))
    assert "spark-b: /etc/netplan/40-cx7.yaml also configures" in output and changed(output) <= {0, 1}
    assert not any(addressed(node) for node in NODES), "the other node is put back too"
    root("spark-b", "rm /etc/netplan/40-cx7.yaml")


def test_mtu_1500_on_one_end_is_found_and_taken_back(untouched, tmp_path):
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": {"spark-b": {"fabric_mtu": 1500}}}}))
    output = words(fabric("-i", str(tmp_path / "hosts.yml"), *FEW, check=False))
    assert "spark-a: rail 0" in output and "small packets pass, 9000 bytes do not" in output
    assert "the previous network is back" in output
    assert not any(addressed(node) for node in NODES)


def test_one_rail_down(untouched):
    ip("spark-b", "link", "set", RAILS[1], "down")
    output = words(fabric(check=False))
    assert "spark-b: cage p0" in output and f"ip link set dev {RAILS[1]} up" in output
    assert f"spark-a: cage p0 ({RAILS[0]} link, {RAILS[1]} no link) has a link on one twin only" in output
    ip("spark-b", "link", "set", RAILS[1], "up")
    wait(lambda: "LOWER_UP" in ip("spark-a", "link", "show", RAILS[1]), 5)


def test_a_second_cable_that_leads_nowhere_does_not_hinder(untouched):
    for end in ("x00", "x01"):
        park("link", "set", end, "up")
    try:
        wait(lambda: all("LOWER_UP" in ip("spark-a", "link", "show", netdev) for netdev in OTHER), 5)
        fabric()
        assert "192.168.176.1/24" in ip("spark-a", "-br", "address", "show", "dev", RAILS[0])
    finally:
        for end in ("x00", "x01"):
            park("link", "set", end, "down")


def test_a_cable_to_something_else_says_so(untouched):
    # Both nodes have a link and see nobody: their rails end at a machine that knows neither.
    for node in NODES:
        for rail in RAILS:
            root(node, f"nft add table netdev away; nft 'add chain netdev away {rail[:4]}{rail[-7:-4]} "
                 f"{{ type filter hook ingress device {rail} priority 0; policy drop; }}'")  # fmt: skip
    output = words(fabric(*FEW, check=False))
    assert "no answer: the cable leads to another machine, spark-b has no 192.168.176.2" in output
    for node in NODES:
        root(node, "nft delete table netdev away")


def swap_cages(node: str) -> None:
    """Move the node's cable to its other cage: the interfaces change names."""
    for rail, other in zip(RAILS, OTHER, strict=True):
        for netdev in (rail, other):
            ip(node, "link", "set", netdev, "down")
        for old, new in ((rail, "swap"), (other, rail), ("swap", other)):
            ip(node, "link", "set", old, "name", new)
        for netdev in (rail, other):
            ip(node, "link", "set", netdev, "up")


def test_crossed_cages_work_with_a_warning():
    swap_cages("spark-b")
    output = words(fabric())
    assert "the cable joins different cages (spark-a p0, spark-b p1)" in output
    assert "192.168.177.2/24" in ip("spark-b", "-br", "address", "show", "dev", OTHER[1])
    assert changed(fabric()) == {0}
    fabric("-e", "fabric_state=absent")
    swap_cages("spark-b")


LEFTOVER = """
nmcli connection add type ethernet con-name leftover ifname enp1s0f0np0 \\
  ipv4.method manual ipv4.addresses 192.168.100.10/24 ipv6.method disabled
nmcli --wait 10 connection up leftover
"""


def use_networkmanager() -> None:
    """Let NetworkManager manage both nodes, as DGX OS has it, and wait until they are back from a reboot."""
    for node in NODES:
        root(node, "sed -i 's/renderer: networkd/renderer: NetworkManager/' /etc/netplan/*.yaml")
        root(
            node,
            "systemctl enable -q NetworkManager; touch /run/old; nohup sh -c 'sleep 0.3; reboot' >/dev/null 2>&1 &",
        )

    def up() -> bool:
        try:
            return all(root(node, "test ! -e /run/old; nmcli -t -f RUNNING general") == "running\n" for node in NODES)
        except AssertionError:
            return False

    wait(up, 60)


def test_a_leftover_networkmanager_profile_is_taken_over_and_comes_back():
    use_networkmanager()
    root("spark-a", LEFTOVER)
    before = {node: picture(node) for node in NODES}
    output = words(fabric())
    assert "the NetworkManager profile 'leftover' on enp1s0f0np0 is taken over" in output
    assert "netplan-enp1s0f0np0" in root("spark-a", "nmcli -t -f NAME connection show --active")
    assert all("fe80" not in ip("spark-a", "-6", "address", "show", "dev", rail) for rail in RAILS)
    assert changed(fabric()) == {0}
    fabric("-e", "fabric_state=absent")
    assert {node: picture(node) for node in NODES} == before
    assert "leftover" in root("spark-a", "nmcli -t -f NAME connection show --active")


@pytest.fixture
def three(tmp_path, request):
    """Three nodes, on a switch or in a ring: arguments for a play that reaches them."""
    lab("down")
    os.environ |= {"LAB_NODES": "3", "LAB_RING": request.param}
    try:
        lab("up")
        nodes = {name.replace("-", "_"): f"10.77.0.{rank + 1}" for rank, name in enumerate((*NODES, "spark-c"))}
        yield make_inventory(tmp_path, **nodes)
    finally:
        lab("down")
        del os.environ["LAB_NODES"], os.environ["LAB_RING"]


CONNECT_FROM = "python3 -c \"import socket; socket.create_connection(('10.77.0.1', {}), 2, ('{}', 0))\" \
2>/dev/null && echo open || echo closed"
JUMBO = "ping -c 1 -W 1 -M do -s 8972 {} >/dev/null && echo {}"


def run_three(inventory: str, *arguments: str, check: bool = True, playbook: str = "playbooks/fabric.yml") -> str:
    return play(playbook, *NO_PROOF, *arguments, inventory=inventory, check=check, LAB_DIR=str(STATE))


def meet(inventory: str, *arguments: str) -> str:
    """Three processes meet by what the serve stage would write; what they say of each other."""
    output = run_three(inventory, *arguments, playbook="tests/e2e/meet.yml")
    (met,) = set(re.findall(r"3 ((?:\S+ en\w+(?:; )?){3})", output))
    return met


@pytest.mark.parametrize("three", [""], indirect=True)
def test_three_nodes_on_a_switch(three):
    assert recap(run_three(three))["spark-c"]["changed"] == 1
    assert changed(run_three(three)) == {0}
    for address in ("192.168.176.1", "192.168.177.2"):
        assert address in root("spark-c", JUMBO.format(address, address))
    assert meet(three) == "; ".join(f"192.168.176.{host} enp1s0f0np0" for host in (1, 2, 3))


@pytest.mark.parametrize("three", ["1"], indirect=True)
def test_three_nodes_in_a_ring(three):
    ring = ("-e", "fabric_topology=ring", "-e", "fabric_subnet=192.168.176.0/21")
    assert "both cages have a cable" in words(run_three(three, check=False))
    assert recap(run_three(three, *ring))["spark-c"]["changed"] == 1
    assert changed(run_three(three, *ring)) == {0}
    # Cable 2 joins port 0 of spark-c (rails 4 and 5) to port 1 of spark-a, cable 1 spark-b to spark-c (2 and 3).
    for address in ("192.168.180.1", "192.168.181.1", "192.168.178.2", "192.168.179.2"):
        assert address in root("spark-c", JUMBO.format(address, address))
    # No rail reaches all ranks: they meet over the management network, where nobody else may ask.
    assert meet(three, *ring) == "; ".join(f"10.77.0.{host} enP7s7" for host in (1, 2, 3))
    root("spark-b", "ip address add 10.77.0.9/24 dev enP7s7")
    for port in (25000, 40000):
        root("spark-a", f'nohup timeout 20 python3 -c "{LISTEN.format(port)}" >/dev/null 2>&1 & sleep 0.5')
        found = {source: root("spark-b", CONNECT_FROM.format(port, source)) for source in ("10.77.0.2", "10.77.0.9")}
        assert found == {"10.77.0.2": "open\n", "10.77.0.9": "closed\n"}, port
    root("spark-b", "ip address delete 10.77.0.9/24 dev enP7s7")
    run_three(three, *ring, "-e", "fabric_state=absent")
    swap_cages("spark-c")
    output = words(run_three(three, *ring, check=False))
    assert "leads to spark-b instead of spark-a: in a ring, port 0 of each node is cabled to port 1" in output
