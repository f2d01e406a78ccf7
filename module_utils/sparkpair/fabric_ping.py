"""Prove the rails: ping every peer over each rail with the largest packet that must pass in one piece."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_guard import Run

HEADERS = 28
"""Bytes of an IPv4 header (20) and an ICMP header (8), which the MTU includes and ping's size does not."""

COUNT = 3
"""Packets of one attempt, all of which must come back."""

_RECEIVED = re.compile(r"(\d+) (?:packets )?received")
_RTT = re.compile(r"= [\d.]+/([\d.]+)/")
_LOCAL_MTU = re.compile(r"message too long,? \(?mtu[= ](\d+)")


@dataclass(frozen=True)
class Path:
    """One rail to one peer; `payload` in bytes, `rtt_ms` is the mean of the attempt that passed."""

    peer: str
    rail: int
    netdev: str
    source: str
    target: str
    payload: int
    rtt_ms: float | None = None

    def command(self, payload: int) -> list[str]:
        """`ping` that leaves by this rail only and may not be split on the way."""
        options = ["-n", "-q", "-M", "do", "-s", str(payload), "-c", str(COUNT), "-i", "0.01", "-W", "1"]
        return ["ping", *options, "-I", self.netdev, self.target]

    def __str__(self) -> str:
        return f"rail {self.rail}, {self.netdev} {self.source} -> {self.peer} {self.target}"


def paths(rails: Sequence[Mapping[str, Any]], rank: int, names: Sequence[str], mtu: int) -> list[Path]:
    """Every rail to every peer. `rails` as `fabric_info` returns them, `names` of the nodes in rank order."""
    found = []
    for peer, name in enumerate(names):
        for rail in rails:
            by_rank = rail["addresses_by_rank"]
            if peer != rank and by_rank[peer]:
                ends = {"source": by_rank[rank], "target": by_rank[peer]}
                found.append(Path(name, rail["rail"], rail["netdev"], payload=mtu - HEADERS, **ends))
    return found


def received(output: str) -> int:
    """Replies that ping counted."""
    match = _RECEIVED.search(output)
    return int(match.group(1)) if match else 0


def mean_rtt(output: str) -> float | None:
    """Mean round trip time in milliseconds."""
    match = _RTT.search(output)
    return float(match.group(1)) if match else None


def diagnose(path: Path, output: str, small_passes: bool) -> str:
    """Why the full packet does not pass, and what mends it."""
    local = _LOCAL_MTU.search(output)
    size = path.payload + HEADERS
    if local:
        return f"{path}: {path.netdev} has MTU {local.group(1)} instead of {size}: run the fabric playbook again"
    if small_passes:
        return (
            f"{path}: small packets pass, {size} bytes do not: the other end or a switch between has a smaller "
            f"MTU; run the fabric playbook on every node and set the switch ports to {size} or more"
        )
    return (
        f"{path}: no answer: the cable leads to another machine, {path.peer} has no {path.target}, or a firewall "
        f"drops ICMP on this rail; look with: ip neigh show dev {path.netdev}; nft list ruleset"
    )


def prove(path: Path, run: Run, deadline: float) -> Path:
    """Ping until a whole attempt comes back or `deadline` (time.monotonic) passes. Raises FabricError then."""
    while True:
        _, out, err = run(path.command(path.payload))
        if received(out) == COUNT:
            return Path(**{**asdict(path), "rtt_ms": mean_rtt(out)})
        if time.monotonic() > deadline:
            _, small, _ = run(path.command(56))
            raise FabricError(diagnose(path, out + err, received(small) > 0))
        time.sleep(0.3)


def prove_all(todo: Sequence[Path], run: Run, seconds: float) -> list[Path]:
    """Prove every path within `seconds` in all. Raises FabricError with one sentence for each that fails."""
    deadline = time.monotonic() + seconds
    proven, failed = [], []
    for path in todo:
        try:
            proven.append(prove(path, run, deadline))
        except FabricError as error:
            failed.append(str(error))
    if failed:
        raise FabricError("; ".join(failed))
    return proven


def parity_warning(names: Sequence[str], cages: Sequence[str]) -> str | None:
    """A sentence when nodes use different cages, which works but confuses tools that assume one name.

    The cage of a node that is not part of the run is empty and does not count.
    """
    if len(set(filter(None, cages))) < 2:
        return None
    pairs = ", ".join(f"{name} {cage}" for name, cage in zip(names, cages, strict=False) if cage)
    return f"the cable joins different cages ({pairs}): it works here, but plug it into the same cage on every node"
