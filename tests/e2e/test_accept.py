"""The GPU stage and the acceptance gate on lab nodes with simulated tools: what passes, and each layer failing in turn.

The tests run in this order on one lab. The chain between the nodes is real: sockets on the fabric, transient units of
the service user, Open MPI, reports. RDMA and NCCL are simulated.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE_RUNS = 6
"""Most module runs of the gpu role on one host when there is nothing to do."""


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(
        command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def lab(*verb: str) -> str:
    return run(sys.executable, "lab/lab.py", *verb)


def play(playbook: str, *arguments: str, check: bool = True) -> str:
    return run("ansible-playbook", "-i", "inventory/lab", f"playbooks/{playbook}.yml", *arguments, check=check)


def root(node: str, command: str) -> str:
    """A command as root on a node, by Ansible, which knows the password."""
    return run("ansible", node, "-i", "inventory/lab", "-b", "-m", "ansible.builtin.shell", "-a", command)


def recap(output: str) -> dict[str, dict[str, int]]:
    lines = re.findall(r"^(spark-\w) +: (.*)$", output.split("PLAY RECAP")[-1], re.MULTILINE)
    return {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in lines}


def accept(reports: Path, *arguments: str) -> tuple[str, dict, int]:
    """Output, newest report, and the exit code that the report gives to a script."""
    output = play("accept", "-e", f"accept_reports={reports}", *arguments, check=False)
    newest = max(reports.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    done = subprocess.run(
        [sys.executable, "module_utils/sparkpair/accept.py", str(newest)], cwd=ROOT, capture_output=True, check=False
    )
    return output, json.loads(newest.read_text()), done.returncode


@pytest.fixture(scope="module", autouse=True)
def nodes(own_lab):
    """Fresh nodes with a driver, as DGX OS ships one, and their fabric."""
    root("sparks", "apt-get -q -o Dir::Etc::sourceparts=- -o Dir::Etc::sourcelist=/dev/null update; "
         "dpkg -i /srv/apt/nvidia-driver-580-open_580.142-0ubuntu1_all.deb")  # fmt: skip
    play("fabric")
    # With this the fabric stage asks ib_write_bw, the simulated one, instead of letting iperf3 stand in.
    root("sparks", "mkdir -p /dev/infiniband && touch /dev/infiniband/uverbs0")


def test_the_gpu_stage_converges_with_few_module_runs():
    assert {counts["changed"] for counts in recap(play("gpu", "--check", "--diff")).values()} == {3}
    assert {counts["changed"] for counts in recap(play("gpu")).values()} == {4}
    counts = recap(play("gpu"))
    # The check of the arguments against their spec runs no module.
    assert {host: (c["changed"], c["ok"] - 1 <= MODULE_RUNS) for host, c in counts.items()} == {
        "spark-a": (0, True),
        "spark-b": (0, True),
    }
    held = root("spark-a", "apt-mark showhold")
    assert all(name in held for name in ("cuda-toolkit-13-0", "libnccl2", "libnccl-dev"))


def test_cuda_that_brings_a_driver_is_refused():
    """tests/unit/test_gpu_apt.py drives apt into all the other traps."""
    before = root("spark-a", "dpkg-query -W | sha256sum")
    output = play("gpu", "-e", "{gpu_packages: {cuda-13-0: 13.0.*}}", check=False)
    assert recap(output)["spark-a"]["failed"] == 1 and re.search(r"expected no change to a driver|expected one", output)
    assert root("spark-a", "dpkg-query -W | sha256sum") == before


def test_an_upgrade_of_everything_leaves_driver_and_pinned_packages_alone():
    play("gpu")
    shown = root("spark-a", "apt-get --simulate dist-upgrade; apt-cache policy nvidia-driver-580-open libnccl2")
    assert "Inst " not in shown and "580.178.04-0ubuntu1" in shown and "2.30.4-1+cuda13.2" in shown


def test_a_key_with_another_fingerprint_changes_nothing():
    output = play("gpu", "-e", f"gpu_apt_fingerprint={'0' * 40}", check=False)
    assert recap(output)["spark-a"] | {"failed": 1, "changed": 0} == recap(output)["spark-a"]
    assert "expected one public key with the fingerprint" in output


# apt takes this lock with fcntl, as flock(1) does not.
HOLD = (
    'python3 -c \'import fcntl, time; f = open("/var/lib/dpkg/lock-frontend", "w"); fcntl.lockf(f, fcntl.LOCK_EX);'
    " time.sleep(120)'"
)


def test_another_apt_is_waited_for_and_named():
    root("spark-a", "apt-mark unhold libnccl-dev; dpkg -r libnccl-dev; systemd-run --unit=holder " + HOLD)
    output = play("gpu", "-e", "gpu_lock_timeout=1", check=False)
    root("spark-a", "systemctl stop holder")
    assert "found another apt at work for 1 s" in output
    assert recap(play("gpu"))["spark-a"]["changed"] == 1


def test_nccl_for_serving_must_be_a_file():
    output = play("gpu", "-e", "gpu_nccl_path=/usr/lib/x86_64-linux-gnu/libnccl.so.2", check=False)
    assert "found no libnccl.so.2, expected /usr/lib/x86_64-linux-gnu/libnccl.so.2" in output


def test_the_whole_gate_passes_and_keeps_what_passed(tmp_path):
    output, report, code = accept(tmp_path, "-e", '{"accept_arms": ["both", "one", "sockets"]}')
    assert (report["verdict"], code) == ("passed", 0), output[-3000:]
    assert [layer["layer"] for layer in report["layers"]] == [
        "link_width", "link_speed", "mtu", "bandwidth", "parity", "known_bad", "busbw", "memory",
    ]  # fmt: skip
    arms = report["layers"][6]["data"]
    assert {name: arm["verdict"]["name"] for name, arm in arms.items()} == {
        "both": "pass",
        "one": "one-rail",
        "sockets": "sockets",
    }
    again = recap(play("accept", "-e", f"accept_reports={tmp_path}", "-e", "accept_when=changed"))
    assert {host: (c["changed"], c["ok"] <= 5) for host, c in again.items()} == dict.fromkeys(again, (0, True))


def test_nothing_of_a_run_stays(tmp_path):
    for node in ("spark-a", "spark-b"):
        left = root(node, "ls -A /run/sparkpair-accept /tmp 2>/dev/null; systemctl list-units --all --plain 'run-*'; "
                    "ss -Hltn sport = :25002; find / -xdev -name 'id_*' -path '*.ssh*' 2>/dev/null")  # fmt: skip
        assert "peer.py" not in left and "secret" not in left and "25002" not in left and "id_" not in left


SYSFS = "/srv/simulated-sysfs/devices/0002:01:00.0/current_link_width"
SPEED = "/srv/simulated-sysfs/class/net/enp1s0f0np0/speed"
TOOL = "/etc/simulated-fabric.json"
FAULTS = {
    "link_width": (f"echo 2 > {SYSFS}", f"echo 4 > {SYSFS}", 11, "fwupdmgr"),
    "link_speed": (f"echo 100000 > {SPEED}", f"echo 200000 > {SPEED}", 12, "200G-baseCR4"),
    "mtu": ("ip link set enp1s0f0np0 mtu 1500", "ip link set enp1s0f0np0 mtu 9000", 13, "fabric.yml"),
    "bandwidth": (
        f"""echo '{{"gbits": {{"rocep1s0f0": 13.22}} }}' > {TOOL}""",
        f"rm {TOOL}",
        14,
        "power both nodes off",
    ),
    "parity": (
        """echo '{"driver_version": "580.159.03"}' > /etc/simulated-nvidia-smi.json""",
        "rm /etc/simulated-nvidia-smi.json",
        15,
        "DGX OS update",
    ),
    "known_bad": (
        """echo '{"failure": "No devices were found"}' > /etc/simulated-nvidia-smi.json""",
        "rm /etc/simulated-nvidia-smi.json",
        16,
        "from the dashboard",
    ),
    "busbw": (f"""echo '{{"worlds": 2}}' > {TOOL}""", f"rm {TOOL}", 17, "MPI=1"),
    "memory": (
        "systemd-run --unit=orphan bash -c 'exec -a VLLM::EngineCore sleep 600'",
        "systemctl stop orphan",
        18,
        "sudo kill",
    ),
}


@pytest.mark.parametrize("layer", FAULTS)
def test_each_layer_fails_by_its_own_code_with_its_remedy(layer, tmp_path):
    fault, mend, code, remedy = FAULTS[layer]
    # The other nodes measure against the head; each rank of NCCL reads its own node's file.
    node = {"bandwidth": "spark-b", "busbw": "sparks"}.get(layer, "spark-a")
    root(node, fault)
    output, report, exit_code = accept(tmp_path, "--tags", layer)
    root(node, mend)
    failed = report["layers"][-1]
    assert (failed["layer"], failed["status"], exit_code) == (layer, "fail", code), output[-3000:]
    assert remedy in failed["remedy"] and f"exit code {code}" in output.replace("\n", " ")
    output, report, exit_code = accept(tmp_path, "--tags", layer)
    assert (report["verdict"], exit_code, len(report["layers"])) == ("passed", 0, 1), output[-3000:]


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [({"hang": True}, "hang"), ({"network": "Socket"}, "sockets"), ({"busbw": 3.1}, "stale-firmware"),
     ({"busbw": 19.9}, "mtu-1500"), ({"busbw": 13.1}, "one-rail")],
)  # fmt: skip
def test_verdicts_of_nccl(overrides, verdict, tmp_path):
    root("spark-a", f"echo '{json.dumps(overrides)}' > {TOOL}")
    _, report, exit_code = accept(tmp_path, "--tags", "busbw", "-e", "accept_nccl_seconds=5")
    root("spark-a", f"rm {TOOL}")
    assert exit_code == 17 and f"({verdict})" in report["layers"][-1]["found"]


def test_the_gate_stops_at_the_first_layer_that_fails(tmp_path):
    root("spark-b", f"echo 100000 > {SPEED}")
    _, report, exit_code = accept(tmp_path)
    root("spark-b", f"echo 200000 > {SPEED}")
    assert [layer["status"] for layer in report["layers"]] == ["pass", "fail"] and exit_code == 12
