"""Measure the rails: RDMA writes where there is an RDMA device, TCP streams where there is none, and judge them.

Static values cannot tell a healthy ConnectX-7 from one that came up badly after a hot-plug: link 200G, PCIe x4 and
clean counters go with 13 Gb/s. The floors of the verdicts are data that is handed in, in Gb/s.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.fabric import FabricError, number
from ansible.module_utils.sparkpair.fabric_guard import Run
from ansible.module_utils.sparkpair.resolve import read_gids

PORT = 18515
"""perftest's own port; rail n uses PORT + n."""

UNIT = "sparkpair-bandwidth-rail{rail}.service"
"""Transient unit of a listener; it ends by itself."""

LISTEN_SECONDS = 300

STREAMS = 4
"""TCP streams of one rail: one alone is bound by its CPU (24 of 200 Gb/s on a Spark)."""

ERRORS = ("port_rcv_errors", "symbol_error", "link_downed", "link_error_recovery")
"""Counters of an RDMA port that a healthy measurement leaves alone."""

STAND_IN = "TCP stand-in, because there is no RDMA device: says nothing about RDMA"

_UNITS = {"Gb/sec": 1.0, "MB/sec": 8 * 1.048576 / 1000, "MiB/sec": 8 * 1.048576 / 1000}
"""perftest's units in Gb/s; its MB are 2^20 bytes."""


@dataclass(frozen=True)
class Measured:
    """One measurement. `rail` is "0", "1" or "all" (sum of all at once); `gbps` is None without a result.

    `sent` are the bytes that the RDMA port counted.
    """

    rail: str
    netdev: str
    peer: str
    tool: str
    gbps: float | None
    sent: int | None = None
    verdict: str = ""
    ok: bool = False
    mend: str = ""


def parse_perftest(output: str) -> float | None:
    """Average bandwidth in Gb/s from ib_write_bw; None when it printed its header and no row.

    Columns are found by name. With a wrong GID the tool ends with status 0 and no row at all.
    """
    columns: list[str] = []
    for line in output.splitlines():
        if line.strip().startswith("#bytes"):
            columns = re.split(r"\s{2,}", line.strip())
            continue
        values = line.split()
        if (
            columns
            and len(values) == len(columns)
            and all(re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) for value in values)
        ):
            for name, value in zip(columns, values, strict=True):
                unit = re.fullmatch(r"BW average\s*\[(.+)\]", name)
                if unit and unit.group(1) in _UNITS:
                    return float(value) * _UNITS[unit.group(1)]
    return None


def parse_iperf(output: str) -> float | None:
    """Received bandwidth in Gb/s from `iperf3 -J`; None when it failed."""
    try:
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 1e9
    except (ValueError, KeyError, TypeError):
        return None


def gid_index(sysfs_root: Path, rail: Mapping[str, Any], rank: int) -> int:
    """The RoCE v2 GID index of a rail's own address. Raises FabricError when it has none."""
    address = rail["addresses_by_rank"][rank]
    port = sysfs_root / "class/infiniband" / rail["hca"] / "ports/1"
    indexes: dict[int, str] = read_gids(port, {rail["netdev"]: [address]})
    if not indexes:
        raise FabricError(f"{rail['hca']} has no RoCE v2 GID for {address}: run the fabric playbook again, or restart")
    return min(indexes)


def tool(rdma: bool, rail: Mapping[str, Any], rank: int, server: int, seconds: int, sysfs_root: Path) -> list[str]:
    """The command of one end: `rank` listens when it is `server`, else it sends to it."""
    port, by_rank = PORT + int(rail["rail"]), rail["addresses_by_rank"]
    if rdma:
        options = ["-d", rail["hca"], "-x", str(gid_index(sysfs_root, rail, rank)), "-p", str(port)]
        target = [] if rank == server else [by_rank[server]]
        return ["ib_write_bw", *options, "-D", str(seconds), "-F", "--report_gbits", *target]
    if rank == server:
        return ["iperf3", "-s", "-B", by_rank[rank], "-p", str(port)]
    streams = ["-t", str(seconds), "-P", str(STREAMS), "-J"]
    return ["iperf3", "-c", by_rank[server], "-B", by_rank[rank], "-p", str(port), *streams]


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether the kernel offers RDMA devices to programs."""
    return any((root / "dev/infiniband").glob("uverbs*"))


def listen(rails: Sequence[Mapping[str, Any]], rank: int, seconds: int, rdma: bool, sysfs_root: Path, run: Run) -> None:
    """Start a listener for each rail. Raises FabricError."""
    for rail in rails:
        command = tool(rdma, rail, rank, rank, seconds, sysfs_root)
        limits = ["--property=Restart=always", "--property=RestartSec=100ms", "--property=StartLimitIntervalSec=0"]
        limits.append(f"--property=RuntimeMaxSec={LISTEN_SECONDS}")
        unit = UNIT.format(rail=rail["rail"])
        run(["systemctl", "stop", unit])
        status, out, err = run(["systemd-run", "--quiet", "--collect", f"--unit={unit}", *limits, *command])
        if status:
            raise FabricError(f"the listener on rail {rail['rail']} did not start: {(err or out).strip()}")


def hush(rails: Sequence[Mapping[str, Any]], run: Run) -> None:
    """Stop all listeners."""
    run(["systemctl", "stop", *(UNIT.format(rail=rail["rail"]) for rail in rails)])


def counter(rail: Mapping[str, Any], name: str, sysfs_root: Path) -> int:
    """A counter of a rail's RDMA port; 0 for one that it does not have."""
    return number(sysfs_root / "class/infiniband" / rail["hca"] / "ports/1/counters" / name) or 0


def errors(rails: Sequence[Mapping[str, Any]], sysfs_root: Path) -> dict[str, dict[str, int]]:
    """`ERRORS` of each rail: hca -> counter -> count."""
    return {rail["hca"]: {name: counter(rail, name, sysfs_root) for name in ERRORS} for rail in rails}


def count(
    node: str, rails: Sequence[Mapping[str, Any]], before: Mapping[str, Mapping[str, int]], sysfs_root: Path
) -> list[Measured]:
    """Rails of a node whose `ERRORS` moved since `before`: while it sent, and while its peers sent to it."""
    found = []
    now = errors(rails, sysfs_root)
    for rail in rails:
        old = before.get(rail["hca"], {})
        moved = {name: value - old[name] for name, value in now[rail["hca"]].items() if value > old.get(name, value)}
        if moved:
            verdict = "errors on the link: " + ", ".join(f"{name} +{delta}" for name, delta in moved.items())
            one = Measured(str(rail["rail"]), rail["netdev"], node, "counters", None)
            found.append(replace(one, verdict=verdict, mend="reseat or replace the cable"))
    return found


def run_quietly(command: Sequence[str], seconds: float) -> str:
    """Output of a command, again every half second until it succeeds or `seconds` passed: the listener may be late."""
    tries = max(1, int(seconds / 0.5))
    for left in range(tries, 0, -1):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 30)
        except subprocess.TimeoutExpired:
            return ""
        if done.returncode == 0 or left == 1:
            return done.stdout
        subprocess.run(["sleep", "0.5"], check=False)
    return ""


def measure(
    rails: Sequence[Mapping[str, Any]],
    rank: int,
    server: int,
    peer: str,
    seconds: int,
    rdma: bool,
    sysfs_root: Path,
) -> list[Measured]:
    """Each rail alone, then all at once, from this node to `server`."""
    name, parse = ("ib_write_bw", parse_perftest) if rdma else ("iperf3", parse_iperf)
    shared = [rail for rail in rails if rail["addresses_by_rank"][server]]

    def together(some: Sequence[Mapping[str, Any]]) -> list[Measured]:
        before = [counter(rail, "port_xmit_data", sysfs_root) for rail in some]
        commands = [tool(rdma, rail, rank, server, seconds, sysfs_root) for rail in some]
        with ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda command: run_quietly(command, 5), commands))
        found = []
        for rail, old, output in zip(some, before, outputs, strict=True):
            # The kernel counts 32-bit words.
            sent = 4 * (counter(rail, "port_xmit_data", sysfs_root) - old) if rdma else None
            found.append(Measured(str(rail["rail"]), rail["netdev"], peer, name, parse(output), sent))
        return found

    alone = [result for rail in shared for result in together([rail])]
    if len(shared) < 2:
        return alone
    both = together(shared)
    total = None if any(one.gbps is None for one in both) else sum(one.gbps or 0.0 for one in both)
    sent = sum(one.sent or 0 for one in both) if rdma else None
    netdevs = "+".join(one.netdev for one in both)
    return [*alone, Measured("all", netdevs, peer, name, total, sent)]


def judge(one: Measured, verdicts: Mapping[str, Sequence[Mapping[str, Any]]], seconds: int) -> Measured:
    """The verdict on a measurement. `verdicts` maps "one" and "all" to rows {floor, verdict, ok, mend}, high to low."""
    if one.gbps is None:
        what = "header without a row: wrong GID index, or a firewall" if one.tool == "ib_write_bw" else "no answer"
        mend = "run the fabric playbook again; look with: nft list ruleset; ufw status"
        return replace(one, verdict=f"no result ({what})", ok=False, mend=mend)
    if one.tool != "ib_write_bw":
        return replace(one, verdict=STAND_IN, ok=True)
    if one.sent is not None and one.sent < one.gbps / 8 * 1e9 * seconds / 2:
        mend = "the RDMA counters of this rail stood still, so the traffic went elsewhere: look with: rdma link"
        return replace(one, verdict="TCP fallback", ok=False, mend=mend)
    rows = verdicts["all" if one.rail == "all" else "one"]
    row = next(row for row in rows if one.gbps >= float(row["floor"]))
    return replace(one, verdict=str(row["verdict"]), ok=bool(row["ok"]), mend=str(row.get("mend", "")))


def line(one: Measured) -> str:
    """A measurement as one line of a table."""
    speed = "-" if one.gbps is None else f"{one.gbps:.1f}"
    rail = "both rails" if one.rail == "all" else f"rail {one.rail}"
    return f"{one.peer}  {rail:<10}  {one.tool:<11}  {speed:>6} Gb/s  {one.verdict}{': ' if one.mend else ''}{one.mend}"


def as_rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Measurements as plain data for `exit_json`, each with its line."""
    return [{**asdict(one), "line": line(one)} for one in found]
