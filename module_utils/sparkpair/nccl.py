"""Output of nccl-tests: read strictly, then judged. A number counts only with both ranks in one world and over RDMA.

Bands are GB/s of bus bandwidth of `all_gather_perf` over two Sparks, from public reports: 22 to 24 healthy, 18.9 to 21
with MTU 1500, 11 to 14 over one of the two rails, about 3 with stale firmware or a missing adapter, 1 to 2.1 over TCP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLOOR = 21.9
"""GB/s that a pair must reach; NVIDIA's own script wants 175 Gb/s, which is 21.875."""

GIB = 1 << 30
MPI_AGENT = "OMPI_MCA_plm_rsh_agent"
"""Variable with the command that stands in for ssh. As an option it reaches the daemon unquoted (4.1.4, measured)."""

ARMS: Mapping[str, Mapping[str, str]] = {
    "both": {},
    "one": {"NCCL_IB_HCA": "one"},
    "sockets": {"NCCL_IB_DISABLE": "1"},
}
"""Arms of a comparison and what they change; "one" stands for the first adapter of the node."""

_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)\s+Group\s+\d+\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[0-9a-f:]+\]\s+(.+?)\s*$"
)
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_RESULT = rf"({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+([0-9]+|N/A)"
_ROW = re.compile(rf"^\s+([0-9]+)\s+([0-9]+)\s+(\w+)\s+(\w+)\s+(-?[0-9]+)\s+{_RESULT}\s+{_RESULT}\s*$")
_AVERAGE = re.compile(rf"^# Avg bus bandwidth\s*:\s*({_NUMBER})\b")
_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*([0-9]+)\s+(OK|FAILED)")
_NETWORK = re.compile(r"NCCL INFO Using network (\S+)")
_DEVICES = re.compile(r"NCCL INFO NET/IB : Using (.*)")
_HCA = re.compile(r"\[[0-9]+\]([A-Za-z0-9_]+):[0-9]+/\w+")
_FAILURE = re.compile(r"\b(?:fail(?:ure|ed)|error|unable|cannot|not found)\b", re.IGNORECASE)
_VERSION = re.compile(r"nccl-library=([0-9]{4,6})\b")


class NcclError(ValueError):
    """Output that proves nothing. `verdict` names the failure, the text says what was found."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True)
class Bench:
    """One run: `hosts` by rank, sizes in bytes, bandwidths in GB/s, `network` IB, Socket or empty when not logged."""

    hosts: tuple[str, ...]
    sizes: tuple[int, ...]
    average: float
    network: str
    hcas: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Verdict:
    """What a run means: `name` of the verdict, whether it passes, what was found and what mends it."""

    name: str
    passed: bool
    found: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


REMEDIES: Mapping[str, str] = {
    "mtu-1500": "ansible-playbook playbooks/fabric.yml (fabric_mtu 9000 on both rails of both nodes)",
    "one-rail": "ansible-playbook playbooks/fabric.yml; both twins need an address and a place in NCCL_IB_HCA",
    "stale-firmware": "on both nodes: sudo fwupdmgr refresh, sudo fwupdmgr upgrade, reboot with the cable plugged in",
    "sockets": "ls /dev/infiniband; ibv_devinfo; ansible-playbook playbooks/fabric.yml",
    "two-worlds": "build nccl-tests with MPI=1: remove the folder under /opt/sparkpair/nccl-tests and run again",
    "same-host": "hostnamectl set-hostname on one node: both ranks report the same host",
    "wrong-values": "reboot both nodes; if it stays, the memory or the adapter is broken: open a support case",
    "hang": "journalctl -k -b on both nodes; ansible-playbook playbooks/fabric.yml (a firewall on a rail hangs it too)",
    "no-result": "run all_gather_perf by hand with the command of the report and read its first error",
    "slow": "ansible-playbook playbooks/accept.yml --tags bandwidth; reboot both nodes with the cable plugged in",
    "no-memory": "ansible-playbook playbooks/stop.yml, then run again",
}


def parse(text: str, ranks: int = 2) -> Bench:
    """Output (with NCCL_DEBUG=INFO) of one run over `ranks` nodes. Raises NcclError when it proves nothing."""
    lines = text.splitlines()
    headers = sum(line.strip() == "# Using devices" for line in lines)
    found = [match for match in map(_RANK.match, lines) if match]
    hosts = {int(match.group(1)): match.group(2) for match in found}
    averages = [match for match in map(_AVERAGE.match, lines) if match]
    if headers > 1 or len(found) > len(hosts) or (found and len(averages) > 1):
        raise NcclError("two-worlds", f"{max(headers, len(averages))} separate results, each of its own world")
    if headers == 1 and hosts and sorted(hosts) != list(range(ranks)):
        raise NcclError("two-worlds", f"rank {', '.join(map(str, sorted(hosts)))} alone in the world")
    if headers == 0 or not hosts or len(averages) != 1:
        raise NcclError("no-result", f"no average bus bandwidth, but: {_cause(lines)}")
    if len(set(hosts.values())) < ranks:
        raise NcclError("same-host", f"all ranks on {hosts[0]}")
    rows = [match for match in map(_ROW.match, lines) if match]
    bounds = [match for match in map(_BOUNDS.match, lines) if match]
    if not rows or len(bounds) != 1:
        raise NcclError("no-result", "an average without a row of sizes or without a check of the values")
    wrong = [row.group(at) for row in rows for at in (9, 13)]
    if bounds[0].group(2) != "OK" or any(value not in ("0", "N/A") for value in wrong):
        raise NcclError("wrong-values", f"{bounds[0].group(1)} values out of bounds")
    networks = {match.group(1) for match in map(_NETWORK.search, lines) if match}
    hcas: list[list[str]] = [_HCA.findall(match.group(1)) for match in map(_DEVICES.search, lines) if match]
    version = _VERSION.search(text)
    return Bench(
        hosts=tuple(hosts[rank] for rank in sorted(hosts)),
        sizes=tuple(int(row.group(1)) for row in rows),
        average=float(averages[0].group(1)),
        network=networks.pop() if len(networks) == 1 else "/".join(sorted(networks)),
        # The fewest that any rank uses.
        hcas=tuple(sorted(hcas, key=len)[0]) if hcas else (),
        version=_dotted(version.group(1)) if version else "",
    )


def _cause(lines: Sequence[str]) -> str:
    """The first line that names a failure, else the last one with a word in it; at most 200 characters."""
    words = [line.strip() for line in lines if re.search(r"[A-Za-z]{2}", line)]
    named = (line for line in words if _FAILURE.search(line))
    return next(named, words[-1] if words else "nothing")[:200]


def _dotted(code: str) -> str:
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def failed(name: str, found: str) -> Verdict:
    """A verdict that does not pass, with its remedy."""
    return Verdict(name, False, found, REMEDIES[name])


def judge(bench: Bench, rails: int = 2, floor: float = FLOOR) -> Verdict:
    """What a run over all `rails` of a pair means; `floor` in GB/s."""
    found = f"{bench.average:.2f} GB/s over {bench.network or 'an unknown network'}"
    used = f"{found} on {', '.join(bench.hcas) or 'no adapter'}"
    if bench.network != "IB":
        return failed("sockets", found)
    if len(bench.hcas) < rails:
        return failed("one-rail", used)
    if bench.average >= floor:
        return Verdict("pass", True, used, "")
    for name, low, high in (
        ("mtu-1500", 18.0, 21.5),
        ("one-rail", 10.5, 14.5),
        ("stale-firmware", 2.5, 5.0),
        ("sockets", 0.0, 2.5),
    ):
        if low <= bench.average < high:
            return failed(name, used)
    return failed("slow", used)


def choose_size(available: int, sizes: Sequence[int], margin: int) -> int | None:
    """Bytes of the largest of `sizes` that `available` bytes of memory hold twice beside `margin`; None when none fits.

    `sizes` and `margin` in GiB. A run of 16 GiB needs 32 GiB of buffers and 8 GiB beside; with less it froze nodes.
    """
    for size in sorted(sizes, reverse=True):
        if (2 * size + margin) * GIB <= available:
            return size * GIB
    return None


def arm_environment(arm: str, environment: Mapping[str, str], hcas: Sequence[str]) -> dict[str, str]:
    """`environment` of a node's rank for one arm; `hcas` are its adapters in the order of the rails."""
    changed = {name: f"={hcas[0]}" if value == "one" else value for name, value in ARMS[arm].items()}
    return {**environment, **changed}


def command(program: str, size: int, iterations: int) -> list[str]:
    """`all_gather_perf` for one size in bytes, one GPU per node, values checked once."""
    return [program, "-b", str(size), "-e", str(size), "-g", "1", "-w", "3", "-n", str(iterations), "-c", "1"]


def mpirun(addresses: Sequence[str], network: str, program: Sequence[str]) -> list[str]:
    """Open MPI 4 with one rank per address; daemons stay attached, started by what MPI_AGENT names instead of ssh.

    `network` (CIDR) carries MPI's own traffic. Variables of NCCL are not forwarded: each daemon's environment has its
    node's own, since adapters may have different names.
    """
    options = {
        "plm_rsh_no_tree_spawn": "1",
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": network,
        "oob_tcp_if_include": network,
    }
    flat = [word for name, value in options.items() for word in ("--mca", name, value)]
    hosts = ",".join(f"{address}:1" for address in addresses)
    return [
        "mpirun",
        "-np",
        str(len(addresses)),
        "-H",
        hosts,
        "--leave-session-attached",
        "--bind-to",
        "none",
        *flat,
        *program,
    ]
