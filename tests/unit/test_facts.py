"""Facts of a node, read from folders and recorded outputs; no input makes a parser raise anything but its own error."""

from __future__ import annotations

import contextlib

import pytest
from ansible.module_utils.sparkpair.facts import (
    INFINITY,
    FactsError,
    driver_package,
    parse_gpu,
    parse_limit,
    parse_listeners,
    parse_module_version,
    parse_packages,
    read_facts,
    tolerant,
)
from ansible.module_utils.sparkpair.known_bad import FACTS
from ansible.module_utils.sparkpair.node import parse_keys, parse_meminfo, read_node
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lab import simulated_rdma

TOOLS = ROOT / "tests/fixtures/tools"
SMI = (TOOLS / "nvidia-smi-query-synthetic.txt").read_text()


def answer(table):
    """A runner that answers by the program of a command; everything else fails."""

    def run(command):
        out = table.get(command[2] if command[0] == "timeout" else command[0], "")
        return (0 if out else 1), out, ""

    return run


@pytest.fixture
def node(tmp_path):
    """A folder that looks like a node's root."""
    for name, text in {
        "proc/driver/nvidia/version": (TOOLS / "proc-driver-nvidia-version.txt").read_text(),
        "proc/cmdline": "root=UUID=0 kho=off\n",
        "proc/meminfo": (TOOLS / "meminfo-kho-synthetic.txt").read_text(),
        "proc/net/tcp": (TOOLS / "proc-net-tcp-synthetic.txt").read_text(),
        "proc/41/cmdline": "VLLM::EngineCore\0",
        "proc/41/cgroup": "0::/user.slice\n",
        "proc/42/cmdline": "VLLM::Worker\0",
        "proc/42/cgroup": "0::/system.slice/sparkpair-rank.service\n",
        "dev/shm/nccl-abc": "x" * 10,
        "dev/shm/pulse-shm-1": "x",
        "etc/sparkpair/rank.env": 'NCCL_DEBUG="INFO"\r\n',
        "etc/sparkpair/engine.yaml": "# head\ngpu-memory-utilization: 0.85\n",
        "etc/sparkpair/api-keys": "\n",
        "etc/default/earlyoom": 'EARLYOOM_ARGS="-m 2 -s 80"\n',
        "home/spark/.ssh/id_ed25519_shared": "key",
        "usr/lib/aarch64-linux-gnu/libnccl.so.2": "library",
        "var/run/reboot-required.pkgs": "nvidia-spark-limits\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for port in simulated_rdma.spark_ports(0):
        simulated_rdma.write_netdev(tmp_path / "sys", port, live=False)
        simulated_rdma.write_hca(tmp_path / "sys", port)
    return tmp_path


def read(node, **table):
    patterns = {"system_log": ["Xid"], "rank_log": ["Socket"]}
    return read_facts(answer(table), patterns, root=node, sysfs=node / "sys")


def test_all_documented_facts_are_read(node):
    facts = {**read_node(["/"], []), **read(node)}
    assert set(FACTS) <= set(facts)


def test_a_node_is_read(node):
    facts = read(
        node,
        **{
            "nvidia-smi": SMI,
            "dpkg-query": (TOOLS / "dpkg-query-synthetic.txt").read_text(),
            "systemctl": "LoadState=loaded\nActiveState=active\nLimitMEMLOCK=8388608\nInvocationID=abc\n",
            "journalctl": "a kernel: NVRM: Xid 119\nb kernel: fine\nc vllm: Using network Socket\n",
        },
    )
    assert facts["driver"] == {"module": "580.142", "package": "580.142", "running": "580.159.03", "error": ""}
    assert facts["gpu"] == {"name": "NVIDIA GB10", "power_w": 10.12, "utilization": 0.0, "clock_mhz": 2418.0}
    assert facts["cuda"] == {"version": "13.0.2-1"}
    assert facts["nccl"]["version"] == "2.28.9" and facts["nccl"]["package"] == "2.28.9-1+cuda13.0"
    assert facts["nccl"]["path"] == "/usr/lib/aarch64-linux-gnu/libnccl.so.2" and len(facts["nccl"]["sha256"]) == 64
    assert facts["meminfo"]["CmaTotal"] == 0 and facts["cmdline"].endswith("kho=off")
    assert facts["rank_unit"] == {"active": 1, "memlock": 8388608}
    assert facts["leftovers"] == {"processes": ["41 VLLM::EngineCore"], "segments": 1, "bytes": 10}
    assert facts["listeners"] == ["0.0.0.0:8000", "127.0.0.1:25000"]
    assert facts["files"]["/etc/sparkpair/rank.env"].endswith("\r\n") and facts["api_key"] == 0
    assert facts["system_log"] == ["a kernel: NVRM: Xid 119"] and facts["rank_log"] == ["c vllm: Using network Socket"]
    assert facts["shared_keys"] == ["/home/spark/.ssh/id_ed25519_shared"]
    assert facts["reboot_required"] == ["nvidia-spark-limits"]
    rails = [nic for nic in facts["nics"] if nic["carrier"]]
    assert [nic["netdev"] for nic in rails] == ["enP2p1s0f0np0", "enp1s0f0np0"]
    assert {(nic["width"], nic["speed"], nic["firmware"]) for nic in rails} == {(4, 200000, "28.45.4028")}


def test_an_empty_node_is_read_without_an_error(tmp_path):
    facts = read(tmp_path)
    assert facts["driver"]["error"] == "no answer within 20 s" and facts["nics"] == [] and facts["rank_unit"] == {}
    assert facts["nccl"]["path"] == "" and facts["rank_env"] == {} and facts["rank_log"] == []


@pytest.mark.parametrize(
    "text",
    [
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n",
        "Failed to initialize NVML: Unknown Error\n",
        "",
        "NVIDIA GB10, 580.142\n",
    ],
)
def test_what_nvidia_smi_says_without_a_driver(tmp_path, text):
    with pytest.raises(FactsError):
        parse_gpu(text)
    assert (
        read(tmp_path, **{"nvidia-smi": text})["driver"]["error"] == (text.splitlines() or ["no answer within 20 s"])[0]
    )


def test_values_that_gb10_does_not_have_are_none():
    assert parse_gpu("NVIDIA GB10, 580.142, [N/A], [N/A], [N/A]\n")["power_w"] is None


def test_removed_packages_are_not_installed():
    assert parse_packages("libnccl2 2.28.9-1 ii \nold 1.0 rc \nheld 2.0 hi \nodd\n") == {
        "libnccl2": "2.28.9-1",
        "held": "2.0",
    }


def test_only_a_driver_has_the_driver_s_version():
    packages = {"nvidia-driver-assistant": "0.21.57-1", "libnvidia-compute-580": "580.142-0ubuntu1"}
    assert driver_package(packages) == "580.142"
    assert driver_package({**packages, "nvidia-driver-580-open": "1:580.159.03-0ubuntu1"}) == "580.159.03"


def test_limits_of_systemd():
    assert [parse_limit(text) for text in ("infinity", "18446744073709551615", "8388608", "", "-1")] == [
        INFINITY,
        INFINITY,
        8388608,
        None,
        None,
    ]


@given(st.text(max_size=200))
def test_no_text_makes_a_parser_raise_anything_else(text):
    parse_module_version(text)
    parse_packages(text)
    parse_listeners(text)
    parse_limit(text)
    parse_keys(text)
    parse_meminfo(f"MemTotal: {text}")
    with contextlib.suppress(FactsError):
        parse_gpu(text)


@given(st.lists(st.text(alphabet="0123456789ABCDEF: \t\n", max_size=60), max_size=6))
def test_odd_socket_tables(lines):
    parse_listeners("\n".join(lines))


def test_a_command_that_is_not_there_answers_127():
    def run_command(command, handle_exceptions):
        raise FileNotFoundError(2, "No such file", command[0])

    assert tolerant(run_command)(["nvidia-smi"])[0] == 127
