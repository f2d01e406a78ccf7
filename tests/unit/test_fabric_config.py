"""Applying the plan, and taking it back: a small network that obeys `ip` and `netplan` stands in for the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_config import alone, confirm, converge, remove, revert, run_task, validate
from ansible.module_utils.sparkpair.fabric_guard import SERVICE, TIMER, UNIT_FILE
from ansible.module_utils.sparkpair.fabric_wanted import ENABLED, SYSCTL_FILE, Config, examine

RAILS = [
    {
        "rail": rail,
        "netdev": netdev,
        "mac": f"4c:bb:47:00:01:0{rail + 1}",
        "address": f"{network}.1/24",
        "addresses_by_rank": [f"{network}.1", f"{network}.2"],
    }
    for rail, (netdev, network) in enumerate((("enp1s0f0np0", "192.168.176"), ("enP2p1s0f0np0", "192.168.177")))
]
PLAN = "network: {version: 2}\n"


class Network:
    """Interfaces that change when the plan is applied. `fails` makes a command answer with an error."""

    def __init__(self, config):
        self.config = config
        self.links = {"enP7s7": (1500, {"10.77.0.1/24"})} | {netdev: (1500, set()) for netdev in config.addresses}
        self.fails, self.calls, self.deaf, self.table, self.profiles = set(), [], False, "", ""
        self.armed = False

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
                for netdev, address in self.config.addresses.items():
                    self.links[netdev] = (self.config.mtu, self.links[netdev][1] | {address})
        if command[0] == "systemd-run" or command == ["systemctl", "stop", TIMER]:
            self.armed = command[0] == "systemd-run"
        if verb == "systemctl is-active":
            return 0, "active\ninactive\n" if self.armed else "inactive\ninactive\n", ""
        if command[0] == "unshare":
            return 0, self.printed(Path(command[-1]).read_text()), ""
        if verb == "nft -s":
            return (0, self.table, "") if self.table else (1, "", "No such file or directory")
        if verb.startswith("systemctl") and command[-1] == "sparkpair-fabric.service":
            self.unit(command[1], command)
        if verb == "nmcli -t":
            return 0, self.profiles, ""
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
    def printed(text):
        """A table as the kernel prints it, near enough: without what comes before it."""
        return text[text.index("table inet sparkpair {") :]

    def unit(self, verb, command):
        """systemd loads our file into the kernel, or takes the table away."""
        link, file = self.config.inside(ENABLED), self.config.inside("/etc/sparkpair/fabric.nft")
        if verb == "enable":
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to("../sparkpair-fabric.service")
        elif verb == "restart":
            self.table = self.printed(file.read_text())
        elif verb == "disable":
            link.unlink(missing_ok=True)
            self.table = ""

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
        names=("spark-a", "spark-b"),
        ports=(29501,),
        journal=Path("/var/lib/sparkpair/fabric/journal.json"),
        root=tmp_path,
    )
    (tmp_path / "etc/netplan").mkdir(parents=True)
    (tmp_path / "etc/hosts").write_text("127.0.0.1 localhost\n")
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
    assert "net.ipv4.conf.enP2p1s0f0np0.arp_announce = 2" in config.inside(SYSCTL_FILE).read_text()
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
    assert predicted.changes[-3].before == "mtu 1500, addresses none\n"
    assert predicted.changes[-3].after == "mtu 9000, addresses 192.168.177.1/24\n"


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

    validate(config, config.files(), run)
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
    sysctl = config.inside(SYSCTL_FILE)
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
    assert "--on-active=45 --timer-property=AccuracySec=1s" in network.calls[armed]
    assert "ConditionPathExists=/var/lib/sparkpair/fabric/journal.json" in config.inside(UNIT_FILE).read_text()
    confirm(config, network)
    assert network.calls[-3:-1] == [f"systemctl stop {TIMER}", f"systemctl disable --quiet {SERVICE}"]
    left = {name for name in snapshot(config.root) if "guard" in name or "journal" in name}
    assert left == set()


def test_a_confirmation_that_comes_too_late_is_refused(config, network):
    converge(config, network, check=False)
    revert(config, network)
    with pytest.raises(FabricError, match="not confirmed within 45 s"):
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


def test_a_second_run_at_once_is_refused_and_takes_nothing_back(config, network):
    first, second = replace(config, run="first"), replace(config, run="second")
    with alone(first, network):
        with pytest.raises(FabricError, match="another run of the fabric stage is at work"), alone(second, network):
            pass
        converge(first, network, check=False)
    with pytest.raises(FabricError, match="another run of the fabric stage is at work"), alone(second, network):
        pass
    assert revert(second, network) is False
    with pytest.raises(FabricError, match="the plan was taken back"):
        confirm(second, network)
    confirm(first, network)
    with alone(second, network):
        assert converge(second, network, check=False).changes == []


def test_a_ring_is_configured_as_a_whole(network):
    settings = {"journal": "/x", "state": "present", "mtu": 9000, "netplan_file": "/x", "netplan": "", "run": ""}
    lists = {"rails": [], "rank": 0, "names": [], "ports": None, "meeting": ["10.77.0.1", ""], "confirm_seconds": 45}
    with pytest.raises(FabricError, match="run without --limit"):
        run_task(settings | lists, network, True)


def test_a_plan_whose_guard_is_gone_keeps_the_oldest_state(config, network):
    before = snapshot(config.root)
    converge(config, network, check=False)
    second = replace(config, mtu=1500, run="second")
    network.config, network.armed = second, False
    with alone(second, network):
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


def apply(config, network):
    """A run that is confirmed."""
    outcome = converge(config, network, check=False)
    confirm(config, network)
    return outcome


@pytest.mark.parametrize("before", [lambda config, network: None, occupied])
def test_absent_brings_back_what_was_there_before_the_first_of_many_runs(config, network, before):
    before(config, network)
    files, links = snapshot(config.root), dict(network.links)
    apply(config, network)
    second = replace(config, mtu=1500, ports=(25000,), names=("spark-a", "other"))
    network.config = second
    apply(second, network)
    predicted = remove(config.journal, network, check=True, root=config.root)
    assert snapshot(config.root) != files
    done = remove(config.journal, network, check=False, root=config.root)
    assert [change.diff() for change in predicted] == [change.diff() for change in done] != []
    assert (snapshot(config.root), network.links, network.table) == (files, links, "")
    assert not (config.root / "var/lib/sparkpair").exists() and not (config.root / "etc/sparkpair").exists()
    assert remove(config.journal, network, check=False, root=config.root) == []


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", ["etc/netplan/40-sparkpair.yaml", "etc/sparkpair/fabric.nft", "etc/hosts"])
def test_absent_refuses_when_somebody_edited_a_file_of_ours(config, network, name, check):
    apply(config, network)
    path = config.root / name
    path.write_text(path.read_text().replace("192.168.176", "10.9.9") + "# mine\n")
    if name == "etc/netplan/40-sparkpair.yaml":
        path.write_text("# mine\n")
    before = snapshot(config.root)
    with pytest.raises(FabricError, match=f"/{name} was edited since .* run playbooks/fabric.yml.*fabric_state=absent"):
        remove(config.journal, network, check=check, root=config.root)
    assert snapshot(config.root) == before
    apply(config, network)
    assert remove(config.journal, network, check=False, root=config.root)


def test_absent_goes_on_where_it_was_cut(config, network):
    files = snapshot(config.root)
    apply(config, network)
    config.inside(config.netplan_file).unlink()  # as restored already
    assert remove(config.journal, network, check=False, root=config.root)
    assert snapshot(config.root) == files


@pytest.mark.parametrize("hosts", ["127.0.0.1 localhost\n", "127.0.0.1 localhost", "", "# latin \xe9\n"])
def test_lines_that_others_add_to_the_hosts_file_stay(config, network, hosts):
    path = config.root / "etc/hosts"
    path.write_bytes(hosts.encode("latin-1"))
    apply(config, network)
    assert b"192.168.177.2 spark-b-rail1\n" in path.read_bytes()
    path.write_bytes(path.read_bytes() + b"192.0.2.1 nas\n")
    assert converge(config, network, check=True).changes == []
    remove(config.journal, network, check=False, root=config.root)
    end = b"" if hosts.endswith("\n") or not hosts else b"\n"
    assert path.read_bytes() == hosts.encode("latin-1") + end + b"192.0.2.1 nas\n"


def test_what_a_former_setting_left_goes(config, network):
    apply(config, network)
    moved = replace(config, netplan_file=Path("/etc/netplan/50-mine.yaml"), ports=None, names=())
    network.config = moved
    apply(moved, network)
    left = set(snapshot(config.root))
    assert "etc/netplan/50-mine.yaml" in left and "etc/netplan/40-sparkpair.yaml" not in left
    assert (network.table, (config.root / "etc/sparkpair/fabric.nft").exists()) == ("", False)
    assert (config.root / "etc/hosts").read_text() == "127.0.0.1 localhost\n"
    assert converge(moved, network, check=True).changes == []


@pytest.mark.parametrize(
    "text",
    [
        "network: {ethernets: {enP2p1s0f0np0: {dhcp4: true}}}\n",
        'network:\n  ethernets:\n    any:\n      match: {name: "en*"}\n',
        "network:\n  ethernets:\n    x:\n      match:\n        macaddress: 4C:BB:47:00:01:01\n",
        "network:\n  bonds:\n    b0: {interfaces: [enp1s0f0np0, eth9]}\n",
    ],
)
def test_a_plan_of_somebody_else_on_a_rail_is_refused_by_name(config, network, text):
    (config.root / "etc/netplan/40-cx7.yaml").write_text(text)
    before = snapshot(config.root)
    with pytest.raises(
        FabricError, match=r"/etc/netplan/40-cx7\.yaml also configures .*\(mv /etc/netplan/40-cx7\.yaml"
    ):
        converge(config, network, check=False)
    assert snapshot(config.root) == before


@pytest.mark.parametrize(
    "text",
    [
        "network: {renderer: NetworkManager}\n",
        "network: {ethernets: {enP7s7: {dhcp4: true}}}\n",
        "# enp1s0f0np0\nnetwork: {ethernets: {enp1s0f0np01: {}, xenp1s0f0np0: {}, enp1s0f0np0.7: {}}}\n",
        'network: {ethernets: {m: {match: {name: "enP7*"}}}} # enp1s0f0np0\n',
    ],
)
def test_plans_of_other_interfaces_are_nobodys_business(config, network, text):
    (config.root / "etc/netplan/00-installer-config.yaml").write_text(text)
    apply(config, network)
    assert (config.root / "etc/netplan/00-installer-config.yaml").read_text() == text


UUID = "6f8a2f3c-1111-2222-3333-444455556666"


def profile(config, network, file, text, device="enp1s0f0np0", name="Wired connection 3"):
    """A NetworkManager that runs with one profile."""
    path = config.inside(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    (config.root / "run/NetworkManager").mkdir(parents=True, exist_ok=True)
    network.profiles = (
        f"99998888-1111-2222-3333-444455556666:802-3-ethernet:enP7s7:/etc/x:Management\n"
        f"{UUID}:802-3-ethernet:{device}:{file}:{name}\nabc:wifi:wlP9s9::Wi\\:Fi\n"
    )


@pytest.mark.parametrize("bound", ["interface-name=enp1s0f0np0", "mac-address=4C:BB:47:00:01:01"])
def test_a_leftover_profile_on_a_rail_is_taken_over_and_comes_back(config, network, bound):
    file = "/etc/NetworkManager/system-connections/Wired connection 3.nmconnection"
    profile(config, network, file, f"[connection]\n{bound}\n")
    before = snapshot(config.root)
    outcome = converge(config, network, check=True)
    assert snapshot(config.root) == before
    assert "'Wired connection 3' on enp1s0f0np0 is taken over" in outcome.said[0]
    apply(config, network)
    assert not config.inside(file).exists()
    assert f"nmcli connection down {UUID}" in network.calls
    network.profiles = ""
    assert converge(config, network, check=True).changes == []
    network.calls.clear()
    remove(config.journal, network, check=False, root=config.root)
    assert snapshot(config.root) == before
    assert network.calls.index("nmcli connection reload") < network.calls.index(f"nmcli --wait 10 connection up {UUID}")


def test_a_profile_that_ubuntu_keeps_as_a_netplan_file_is_taken_over(config, network):
    plan = config.root / f"etc/netplan/90-NM-{UUID}.yaml"
    plan.write_text(f"network:\n  ethernets:\n    NM-{UUID}:\n      match: {{name: enp1s0f0np0}}\n")
    run = f"/run/NetworkManager/system-connections/netplan-NM-{UUID}.nmconnection"
    profile(config, network, run, "[connection]\ninterface-name=enp1s0f0np0\n")
    apply(config, network)
    assert not plan.exists()
    network.profiles = ""
    remove(config.journal, network, check=False, root=config.root)
    assert plan.exists()


def test_a_profile_for_any_interface_is_refused_and_our_own_is_not_a_leftover(config, network):
    profile(config, network, "/etc/NetworkManager/system-connections/any.nmconnection", "[connection]\n", name="any")
    with pytest.raises(FabricError, match=r"'any' is active on enp1s0f0np0, but fits any interface: .*interface-name"):
        converge(config, network, check=False)
    ours = "/run/NetworkManager/system-connections/netplan-enp1s0f0np0.nmconnection"
    profile(config, network, ours, "[connection]\ninterface-name=enp1s0f0np0\n", name="netplan-enp1s0f0np0")
    assert examine(config, network).profiles == []


def test_an_active_ufw_lets_both_rails_in_and_forgets_them_with_us(config, network):
    (config.root / "etc/ufw").mkdir()
    (config.root / "etc/ufw/ufw.conf").write_text("# ENABLED=no\nENABLED=yes\n")
    rules = config.root / "etc/ufw/user.rules"
    rules.write_text("### tuple ### allow any any 0.0.0.0/0 any 0.0.0.0/0 in_enp1s0f0np0\n")
    apply(config, network)
    assert "ufw allow in on enP2p1s0f0np0" in network.calls and "ufw allow in on enp1s0f0np0" not in network.calls
    remove(config.journal, network, check=False, root=config.root)
    assert "ufw delete allow in on enP2p1s0f0np0" in network.calls
    assert "ufw delete allow in on enp1s0f0np0" not in network.calls


def test_an_active_ufw_that_shuts_out_a_rank_of_a_ring_is_named(config, network):
    (config.root / "etc/ufw").mkdir()
    (config.root / "etc/ufw/ufw.conf").write_text("ENABLED=yes\n")
    (config.root / "etc/ufw/user.rules").write_text("### tuple ### allow any any 0.0.0.0/0 any 10.77.0.3 in\n")
    ring = replace(config, rank=1, meeting=("10.77.0.1", "10.77.0.2", "10.77.0.3"))
    (said,) = converge(ring, network, check=True).said
    assert "no rule for 10.77.0.1" in said and said.endswith("ufw allow from 10.77.0.1")


def test_a_sleeping_ufw_is_left_alone(config, network):
    (config.root / "etc/ufw").mkdir()
    (config.root / "etc/ufw/ufw.conf").write_text("ENABLED=no\n")
    assert examine(config, network).ufw == []


def test_a_table_that_somebody_flushed_comes_back(config, network):
    apply(config, network)
    network.table = ""
    assert [change.title for change in apply(config, network).changes] == ["nftables table inet sparkpair"]
    assert "192.168.176.2" in network.table


def test_where_ranks_meet_off_the_rails_peers_alone_may_ask(config, network):
    ring = replace(config, rank=1, meeting=("10.77.0.1", "10.77.0.2", "10.77.0.3"))
    lines = [line.strip() for line in ring.firewall().splitlines()]
    accept, ephemeral = "ip saddr { 10.77.0.1, 10.77.0.3 } accept", "tcp dport 32768-60999 ct state new drop"
    assert lines.index(accept) < lines.index(ephemeral) < lines.index("tcp dport { 29501 } drop")
    assert accept not in config.firewall() and ephemeral not in config.firewall()


def test_a_table_that_nft_cannot_load_is_refused_before_anything_changes(config, network):
    before = snapshot(config.root)

    def broken(command):
        return (127, "", "sh: nft: not found") if command[0] == "unshare" else network(command)

    with pytest.raises(FabricError, match=r"nft: not found.*apt-get install nftables.*fabric_firewall"):
        converge(config, broken, check=False)
    assert snapshot(config.root) == before
