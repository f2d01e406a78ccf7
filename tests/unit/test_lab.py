"""The lab's pure parts: settings, address plan, what is written to disks, parsing of what the kernel says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab import cgroups, cli, disk, host, leftovers, lifecycle, network, supervisor
from lab.settings import INTERFACES, LabError, Node, environment, read_settings

ROOT = Path(__file__).resolve().parents[2]
SMI = ROOT / "lab/rootfs/usr/local/lib/lab/simulated-nvidia-smi"


def settings(**variables):
    return read_settings(variables, Path("/clone"))


def test_settings_default_to_two_nodes_in_the_checkout():
    lab = settings()
    assert [(node.name, node.address) for node in lab.nodes] == [("spark-a", "10.77.0.1"), ("spark-b", "10.77.0.2")]
    assert (lab.ident, lab.state, lab.cache) == ("sparkpair", Path("/clone/.lab"), Path("/clone/.cache"))


def test_a_lab_of_another_name_has_its_own_folder():
    assert settings(LAB_ID="second").state == Path("/clone/.lab/second")


def test_settings_survive_the_way_through_the_environment():
    lab = settings(LAB_ID="other", LAB_NODES="3", LAB_DIR="/elsewhere")
    assert read_settings(environment(lab)) == lab


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LAB_ID", "spark-pair"),  # a dash would make "spark" own the namespaces of "spark-pair"
        ("LAB_ID", "../x"),
        ("LAB_ID", "Lab"),
        ("LAB_ID", "1lab"),
        ("LAB_ID", "a" * 17),
        ("LAB_NODES", "1"),
        ("LAB_NODES", "4"),
        ("LAB_NODES", "two"),
        ("LAB_DIR", "/a:b"),
        ("LAB_CACHE_DIR", "/a,b"),
    ],
)
def test_settings_that_cannot_be_are_refused(variable, value):
    with pytest.raises(LabError, match=re.escape(value)):
        settings(**{variable: value})


def test_an_unknown_node_is_refused_with_the_names_there_are():
    with pytest.raises(LabError, match="spark-a, spark-b"):
        settings().node("spark-c")


def test_hardware_addresses_are_unique_and_unicast():
    macs = [Node(index).mac(interface) for index in range(3) for interface in INTERFACES]
    assert len(set(macs)) == len(macs)
    assert all(int(mac[:2], 16) & 1 == 0 for mac in macs)


@pytest.mark.parametrize("count", ["2", "3"])
def test_every_interface_gets_one_cable_end_that_the_kernel_can_name(count):
    lab = settings(LAB_NODES=count)
    commands = network.cable_commands(lab)
    ends = re.findall(r"(?:link add|peer name) (\S+)(?= address| type veth|$)", "\n".join(commands), re.MULTILINE)
    wanted = [node.parked(interface) for node in lab.nodes for interface in INTERFACES]
    assert sorted(end for end in ends if "-" in end) == sorted(wanted)
    assert len(set(ends)) == len(ends)
    assert all(len(end) <= 15 for end in ends)


def test_two_nodes_are_cabled_back_to_back_and_three_over_bridges():
    assert not any("bridge" in command for command in network.cable_commands(settings()))
    three = network.cable_commands(settings(LAB_NODES="3"))
    assert sum("type bridge" in command for command in three) == 2
    assert sum("master rail0 mtu 9000" in command for command in three) == 3


HYBRID = """\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
33 30 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw
"""
PURE = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_control_group_hierarchies_of_both_kinds_of_machine():
    assert cgroups.parse_hierarchies(HYBRID) == [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd")]
    assert cgroups.parse_hierarchies(PURE) == [Path("/sys/fs/cgroup")]
    assert cgroups.parse_hierarchies("31 24 0:27 / / rw - ext4 /dev/vda rw\n") == []


@pytest.fixture
def hierarchy(tmp_path, monkeypatch):
    """A folder that looks like an empty cgroup2 hierarchy."""
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path])
    return tmp_path


def test_processes_are_found_in_groups_below_too(hierarchy):
    for name, pids in (
        ("lab", ""),
        ("lab/spark-a", "12\n"),
        ("lab/spark-a/boot/payload", "13\n14\n"),
        ("other", "99\n"),
    ):
        (hierarchy / name).mkdir(parents=True, exist_ok=True)
        (hierarchy / name / "cgroup.procs").write_text(pids)
    assert cgroups.Group("lab").pids() == {12, 13, 14}
    assert cgroups.Group("lab").child("spark-b").pids() == set()


def test_a_group_is_removed_with_everything_below_and_its_neighbour_stays(hierarchy):
    (hierarchy / "lab/spark-a/boot/payload/system.slice").mkdir(parents=True)
    (hierarchy / "lab2").mkdir()
    cgroups.Group("lab").remove()
    assert [folder.name for folder in hierarchy.iterdir()] == ["lab2"]


def test_a_group_that_cannot_be_removed_is_named(hierarchy):
    (hierarchy / "lab").mkdir()
    (hierarchy / "lab/file").write_text("")  # an rmdir fails, as in a group with a process
    with pytest.raises(LabError, match=str(hierarchy / "lab")):
        cgroups.Group("lab").remove(seconds=0)


def test_only_mounts_of_this_lab_are_its_leftovers():
    table = (
        "90 24 0:50 / /a\\040b/root rw - overlay sparkpair-lab-spark-a rw,lowerdir=/x\n"
        "91 24 0:51 / /c rw - overlay sparkpair-lab-second-spark-a rw\n"
        "92 24 0:52 / /d rw - tmpfs tmpfs rw\n"
    )
    assert leftovers.parse_mounts(table, settings()) == ["/a b/root"]


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: FE004D0A:A1B2 01004D0A:0016 01 00000000:00000000 02:000A7214 00000000     0        0 4711 2 0000000000000000 20
   1: FE004D0A:A1B4 02004D0A:0016 01 00000000:00000000 02:000A7214 00000000     0        0 4712 2 0000000000000000 20
   2: FE004D0A:A1B4 02004D0A:0016 06 00000000:00000000 03:000A7214 00000000     0        0 0 2 0000000000000000
"""


def test_sockets_into_the_lab_are_found_by_peer():
    assert leftovers.parse_socket_inodes(TCP) == {"4711", "4712"}
    assert leftovers.parse_socket_inodes(TCP, "10.77.0.2") == {"4712"}
    assert leftovers.parse_socket_inodes("") == set()


def test_interfaces_of_the_lab_are_known_by_their_hardware_address():
    listing = json.dumps(
        [{"ifname": "veth1", "address": Node(0).mac("enP7s7")}, {"ifname": "x", "address": "0a:0:0:0:0:1"}, {}]
    )
    assert leftovers.parse_links(listing, [Node(0).mac("enP7s7")]) == ["veth1"]
    assert leftovers.parse_links("", ["02:77:00:00:01:01"]) == []


def test_state_files_leave_another_labs_folder_alone(tmp_path):
    lab = read_settings({}, tmp_path)
    leftovers.claim_state(lab)
    for name in ("keys", "spark-a", ".spark-b.partial", ".old-7", "second"):
        (lab.state / name).mkdir(parents=True)
    leftovers.claim_state(lab)
    leftovers.remove_state(lab)
    assert [path.name for path in lab.state.iterdir()] == ["second"]


def test_a_folder_that_no_lab_marked_is_neither_filled_nor_emptied(tmp_path):
    lab = read_settings({"LAB_DIR": str(tmp_path / "etc")}, tmp_path)
    (lab.state / "apt/sources.list.d").mkdir(parents=True)
    with pytest.raises(LabError, match=r"holds apt and no \.sparkpair-lab"):
        leftovers.claim_state(lab)
    assert leftovers.state_files(lab) == []
    leftovers.remove_state(lab)
    assert (lab.state / "apt/sources.list.d").is_dir()


@pytest.mark.parametrize("ident", ["systemd", "netns", "lab", "park", "spark", "sparkpair"])
def test_what_down_removes_has_the_labs_own_name(ident):
    lab, plain = settings(LAB_ID=ident), settings()
    assert lab.run_folder.name.startswith("sparkpair-lab")
    names = [lab.lab_namespace, lab.park_namespace, *(lab.namespace(node) for node in lab.nodes)]
    assert all(lab.owns(name) for name in names)
    assert [plain.owns(name) for name in names] == [ident == "sparkpair"] * len(names)


def test_password_is_set_for_one_user_only():
    shadow = "root:*:1:0:99999:7:::\nspark:!:1:0:99999:7:::\nsparky:!:1:0:99999:7:::\n"
    assert disk.set_password(shadow, "spark", "$6$x") == shadow.replace("spark:!", "spark:$6$x")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="asks the SSH client how it reads the file")
def test_ssh_configuration_names_every_node_and_is_strict():
    text = disk.ssh_config(settings(LAB_NODES="3"), "/usr/bin/python3")
    assert "Host spark-c 10.77.0.3\n  HostName 10.77.0.3\n" in text
    assert "StrictHostKeyChecking yes" in text
    assert 'UserKnownHostsFile "/clone/.lab/known_hosts"' in text
    done = subprocess.run(
        ["ssh", "-F", "/dev/stdin", "-G", "spark-c"], input=text, capture_output=True, text=True, check=True
    )
    assert {"user spark", "hostname 10.77.0.3", "proxyusefdpass yes", "identitiesonly yes"} <= set(
        done.stdout.splitlines()
    )


def test_every_node_masks_what_would_reach_the_whole_machine_or_the_network():
    masked = {name for name, target in disk.LINKS.items() if target == "/dev/null"}
    assert {"etc/systemd/system/apt-daily.timer", "etc/sysctl.d/50-pid-max.conf"} <= masked


def test_what_is_simulated_says_so_in_its_name():
    assert "simulated" in disk.LINKS["usr/local/bin/nvidia-smi"]
    assert "simulated" in disk.SYSFS


def test_only_the_head_sees_the_model():
    record = lifecycle.Record("/s", "/c", 2, "/lower", "/wheels", "/model")
    assert [target for _, target in record.binds(Node(0))] == ["/srv/apt", "/srv/wheelhouse", "/srv/model"]
    assert [target for _, target in record.binds(Node(1))] == ["/srv/apt"]


def test_nspawn_mounts_read_only_and_cannot_load_modules_or_set_the_clock():
    arguments = supervisor.nspawn_arguments(settings(), Node(0), [(Path("/a:b"), "/srv/x")])
    assert "--bind-ro=/a\\:b:/srv/x" in arguments
    assert not any(
        "CAP_SYS_MODULE" in argument or "CAP_SYS_TIME" in argument or "=all" in argument for argument in arguments
    )


@pytest.mark.parametrize(
    ("boot", "launcher", "namespace", "marker", "state"),
    [
        (True, True, True, False, "running"),
        (True, False, True, False, "unsupervised"),
        (True, True, False, False, "unsupervised"),
        (False, False, True, True, "off"),
        (False, False, True, False, "dead"),
    ],
)
def test_node_states(hierarchy, tmp_path, monkeypatch, boot, launcher, namespace, marker, state):
    lab = read_settings({}, tmp_path)
    node = lab.nodes[0]
    for name, populated in (("boot", boot), ("launcher", launcher)):
        group = hierarchy / lab.name / node.name / name
        group.mkdir(parents=True)
        (group / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
    monkeypatch.setattr(network, "exists", lambda name: namespace)
    lab.node_folder(node).mkdir(parents=True)
    if marker:
        supervisor.mark_off(lab, node)
    assert lifecycle.node_state(lab, node) == state


def test_missing_tools_are_named_by_package(tmp_path):
    tools = {"sh": "dash", "no-such-tool": "tool-package", str(tmp_path / "keyring"): "keyring-package"}
    assert host.missing_packages(tools) == ["keyring-package", "tool-package"]


def test_what_cannot_be_installed_is_named_at_once(monkeypatch):
    monkeypatch.setattr(host, "missing_packages", lambda: ["systemd-container"])
    monkeypatch.setattr(host.shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="no apt to install it: systemd-container"):
        host.require_installable()


def test_without_root_the_command_to_use_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    assert cli.main(["up"]) == 1
    assert "needs root" in capsys.readouterr().err


def test_on_another_system_the_lab_says_at_once_that_it_needs_linux(monkeypatch, capsys):
    monkeypatch.setattr(host.sys, "platform", "darwin")
    assert cli.main(["status"]) == 1
    assert "needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["kill"], ["up", "spark-a"]])
def test_wrong_arguments_end_with_status_2(arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)


def test_a_remote_command_keeps_its_options():
    options = cli.parser().parse_args(["ssh", "spark-a", "ls", "-l", "--all"])
    assert (options.node, options.command) == ("spark-a", ["ls", "-l", "--all"])


def test_the_lock_lets_one_in_and_leaves_no_file(tmp_path):
    path = tmp_path / "lock"
    program = f"from pathlib import Path; from lab import host\nwith host.lock(Path({str(path)!r}), 'up'): print('in')"
    with host.lock(path, "down"):
        second = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert "waiting for `lab.py down`" in second.stdout.readline()
    assert second.communicate(timeout=10)[0] == "in\n"
    assert not path.exists()


def smi(*arguments):
    done = subprocess.run([sys.executable, SMI, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_simulated_nvidia_smi_answers_queries_as_a_gb10_does():
    fields = "name,memory.used,memory.total,utilization.gpu"
    assert smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits") == (0, ["NVIDIA GB10, [N/A], [N/A], 0"])
    assert smi("--query-gpu=driver_version", "--format=csv") == (0, ["driver_version", "580.142"])
    assert smi("--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader") == (0, [])
    assert smi("--query-gpu=nonsense", "--format=csv")[0] == 2
    assert smi("--reset")[0] == 6


def test_simulated_nvidia_smi_draws_a_table_with_straight_edges():
    status, lines = smi()
    assert status == 0
    assert {len(line) for line in lines if line} == {91}
