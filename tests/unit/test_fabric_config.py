"""Applying the plan, and taking it back: a small network that obeys `ip` and `netplan` stands in for the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_config import Config, confirm, converge, revert, validate
from ansible.module_utils.sparkpair.fabric_guard import SERVICE, TIMER, UNIT_FILE

RAILS = {"enp1s0f0np0": "192.168.176.1/24", "enP2p1s0f0np0": "192.168.177.1/24"}
PLAN = "network: {version: 2}\n"


class Network:
    """Interfaces that change when the plan is applied. `fails` makes a command answer with an error."""

    def __init__(self, config):
        self.config = config
        self.links = {"enP7s7": (1500, {"10.77.0.1/24"})} | {netdev: (1500, set()) for netdev in config.rails}
        self.fails, self.calls, self.deaf = set(), [], False

    def __call__(self, command):
        self.calls.append(" ".join(command))
        verb = " ".join(command[:2])
        if verb in self.fails:
            return 1, "", f"{verb} is broken"
        if command == ["ip", "-j", "addr"]:
            return 0, json.dumps([self.link(*item) for item in self.links.items()]), ""
        if verb == "netplan apply" and not self.deaf:
            plan = self.config.inside(self.config.netplan_file)
            if plan.is_file() and plan.read_bytes() == self.config.netplan_text.encode():
                for netdev, address in self.config.rails.items():
                    self.links[netdev] = (self.config.mtu, self.links[netdev][1] | {address})
        if verb in ("ip address", "ip link"):
            netdev = command[command.index("dev") + 1]
            mtu, addresses = self.links[netdev]
            if command[2] == "delete":
                addresses = addresses - {command[3]}
            elif command[2] == "add":
                addresses = addresses | {command[3]}
            else:
                mtu = int(command[-1])
            self.links[netdev] = (mtu, addresses)
        return 0, "", ""

    @staticmethod
    def link(name, state):
        pairs = [address.split("/") for address in sorted(state[1])]
        info = [{"family": "inet", "local": local, "prefixlen": int(prefix)} for local, prefix in pairs]
        return {"ifname": name, "mtu": state[0], "addr_info": info}

    def applied(self):
        return self.calls.count("netplan apply")


@pytest.fixture
def config(tmp_path):
    config = Config(
        rails=RAILS,
        mtu=9000,
        netplan_file=Path("/etc/netplan/40-sparkpair.yaml"),
        netplan_text=PLAN,
        sysctl_file=Path("/etc/sysctl.d/90-sparkpair-fabric.conf"),
        journal=Path("/var/lib/sparkpair/fabric/journal.json"),
        root=tmp_path,
    )
    (tmp_path / "etc/netplan").mkdir(parents=True)
    for path in config.settings():
        config.inside(path).parent.mkdir(parents=True, exist_ok=True)
        config.inside(path).write_text("0\n")
    return config


@pytest.fixture
def network(config):
    return Network(config)


def snapshot(root):
    """Every file below `root` with content and mode."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in root.rglob("*")
        if path.is_file()
    }


def test_first_run_writes_applies_and_waits_for_confirmation(config, network):
    outcome = converge(config, network, check=False)
    plan = config.inside(config.netplan_file)
    assert (plan.read_text(), plan.stat().st_mode & 0o777) == (PLAN, 0o600)
    assert "net.ipv4.conf.enP2p1s0f0np0.arp_announce = 2" in config.inside(config.sysctl_file).read_text()
    assert [config.inside(path).read_text().strip() for path in config.settings()] == ["1", "2", "1", "2"]
    assert network.links["enp1s0f0np0"] == (9000, {"192.168.176.1/24"})
    assert outcome.changes and outcome.pending
    confirm(config, network)
    assert not config.inside(config.journal).exists()


def test_second_run_changes_nothing_and_applies_nothing(config, network):
    converge(config, network, check=False)
    confirm(config, network)
    before, applied = snapshot(config.root), network.applied()
    outcome = converge(config, network, check=False)
    assert (outcome.changes, outcome.pending) == ([], False)
    assert (snapshot(config.root), network.applied()) == (before, applied)


def test_check_mode_predicts_what_the_run_then_does_and_touches_nothing(config, network):
    before = snapshot(config.root)
    predicted = converge(config, network, check=True)
    assert snapshot(config.root) == before
    assert network.applied() == 0
    done = converge(config, network, check=False)
    assert [change.diff() for change in predicted.changes] == [change.diff() for change in done.changes]
    assert predicted.changes[-1].before == "mtu 1500, addresses none\n"
    assert predicted.changes[-1].after == "mtu 9000, addresses 192.168.177.1/24\n"


@pytest.mark.parametrize("check", [True, False])
def test_a_plan_that_netplan_refuses_never_reaches_the_disk(config, network, check):
    before = snapshot(config.root)
    network.fails = {"netplan generate"}
    with pytest.raises(FabricError, match=r"netplan refuses /etc/netplan/40-sparkpair\.yaml: netplan generate"):
        converge(config, network, check=check)
    assert snapshot(config.root) == before
    assert network.applied() == 0


def test_the_plan_is_validated_together_with_the_others(config):
    (config.root / "etc/netplan/00-installer-config.yaml").write_text("network: {}\n")
    seen = {}

    def run(command):
        folder = Path(command[-1]) / "etc/netplan"
        seen.update({file.name: file.read_text() for file in folder.iterdir()})
        return 0, "", ""

    validate(config, run)
    assert seen == {"00-installer-config.yaml": "network: {}\n", "40-sparkpair.yaml": PLAN}


@pytest.mark.parametrize("path", ["/etc/netplan/plan.txt", "/tmp/40-sparkpair.yaml", "/etc/netplan/x/40.yaml"])
def test_a_file_that_netplan_would_not_read_is_refused(config, network, path):
    with pytest.raises(FabricError, match=r"is not a \.yaml file in /etc/netplan"):
        converge(replace(config, netplan_file=Path(path)), network, check=True)


def occupied(config, network):
    """A node that somebody configured before us: files, settings, addresses and MTU of their own."""
    plan = config.inside(config.netplan_file)
    plan.write_bytes(b"# theirs, not even UTF-8: \xff\n")
    plan.chmod(0o640)
    sysctl = config.inside(config.sysctl_file)
    sysctl.parent.mkdir(parents=True)
    sysctl.write_text("# theirs\n")
    network.links["enp1s0f0np0"] = (4000, {"192.168.100.10/24"})


@pytest.mark.parametrize("before", [lambda config, network: None, occupied])
@pytest.mark.parametrize("failure", ["netplan apply", "deaf", "peer"])
def test_whatever_fails_the_node_is_as_before(config, network, before, failure):
    before(config, network)
    files, links = snapshot(config.root), dict(network.links)
    if failure == "peer":
        converge(config, network, check=False)
        assert snapshot(config.root) != files
        assert revert(config, network) is True
    else:
        network.deaf = failure == "deaf"
        network.fails = {failure}
        with pytest.raises(
            FabricError, match=r"the previous network is back|addresses are as before, but netplan apply"
        ):
            converge(config, network, check=False, seconds=0)
    assert snapshot(config.root) == files
    assert network.links == links


def test_the_timer_is_armed_before_anything_changes_and_gone_after_the_confirmation(config, network):
    converge(config, network, check=False)
    armed = next(i for i, call in enumerate(network.calls) if call.startswith("systemd-run"))
    assert armed < network.calls.index("netplan apply")
    assert "--on-active=50 --timer-property=AccuracySec=1s" in network.calls[armed]
    assert "ConditionPathExists=/var/lib/sparkpair/fabric/journal.json" in config.inside(UNIT_FILE).read_text()
    confirm(config, network)
    assert network.calls[-3:-1] == [f"systemctl stop {TIMER}", f"systemctl disable --quiet {SERVICE}"]
    left = {name for name in snapshot(config.root) if "guard" in name or "journal" in name}
    assert left == set()


def test_a_confirmation_that_comes_too_late_is_refused(config, network):
    converge(config, network, check=False)
    revert(config, network)
    with pytest.raises(FabricError, match="not confirmed within 50 s"):
        confirm(config, network)


def test_a_plan_that_cannot_be_guarded_is_not_applied(config, network):
    before = snapshot(config.root)
    network.fails = {"systemd-run --quiet"}
    with pytest.raises(FabricError, match=r"systemd-run .* failed"):
        converge(config, network, check=False)
    assert snapshot(config.root) == before
    assert network.links["enp1s0f0np0"] == (1500, set())


def test_the_copy_on_the_node_restores_without_ansible(config, network, tmp_path):
    """The program that `arm` leaves behind runs alone, against commands that do nothing."""
    converge(config, network, check=False)
    program = config.inside(config.journal).with_name("guard.py")
    (tmp_path / "plan").write_text("ours")
    journal = tmp_path / "journal.json"
    journal.write_text(json.dumps({"files": {str(tmp_path / "plan"): None}, "settings": {}, "live": {}}))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, output in (("ip", "[]"), ("netplan", ""), ("systemctl", "")):
        (commands / name).write_text(f"#!/bin/sh\necho '{output}'\n")
        (commands / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-I", program, journal],
        env={"PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the previous network is back" in done.stdout
    assert not (tmp_path / "plan").exists()
    assert not journal.exists()


def test_an_unconfirmed_plan_keeps_the_oldest_state(config, network):
    before = snapshot(config.root)
    converge(config, network, check=False)
    second = replace(config, mtu=1500)
    network.config = second
    assert converge(second, network, check=False).pending
    assert revert(second, network) is True
    assert snapshot(config.root) == before
    assert revert(second, network) is False


def test_what_somebody_changed_by_hand_is_put_right(config, network):
    converge(config, network, check=False)
    confirm(config, network)
    network.links["enP2p1s0f0np0"] = (1500, set())
    first_setting = next(iter(config.settings()))
    config.inside(first_setting).write_text("0\n")
    config.inside(config.netplan_file).chmod(0o644)
    outcome = converge(config, network, check=False)
    assert [change.title for change in outcome.changes] == [
        "/etc/netplan/40-sparkpair.yaml (mode 0644 -> 0600)",
        str(first_setting),
        "interface enP2p1s0f0np0",
    ]
    confirm(config, network)
    assert converge(config, network, check=False).changes == []
