"""The scenarios S1 to S25 that concern the fabric, each on a kernel-shaped tree: what the stage says, and what a start.

The tests around it look closer: test_fabric.py at the choice of the cage, test_fabric_resolve.py at devices and GIDs,
test_fabric_ping.py at S9 (MTU 9000 and 1500 mixed), test_fabric_bandwidth.py at S10 and S11 (numbers of ib_write_bw).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sparkpair import resolve
from ansible.module_utils.sparkpair.fabric import FabricError, read_fabric
from ansible.module_utils.sparkpair.resolve import Plan, ResolveError, read_devices

from lab.simulated_rdma import Port, gid_of_ipv4, spark_ports, write, write_hca, write_netdev

SUBNET = "192.168.176.0/23"
Change = Callable[[Path], None]


def ports(cabled: str = "p0", reverse: bool = False, **changes: Mapping[str, Any]) -> list[Port]:
    """The head's four ports, single ones changed by the name of their device, in either order."""
    found = [replace(port, **changes.get(port.hca, {})) for port in spark_ports(0, cabled)]
    return found[::-1] if reverse else found


def gids(hca: str, netdev: str, **slots: str) -> Change:
    """Give a device the GID of `i5="192.168.176.1"` in slot 5 as RoCE v2, in slot 4 as v1; "" empties both slots."""

    def change(root: Path) -> None:
        port = root / "class/infiniband" / hca / "ports/1"
        for name, address in slots.items():
            for index, kind in ((int(name[1:]) - 1, "IB/RoCE v1"), (int(name[1:]), "RoCE v2")):
                for attribute in ("types", "ndevs"):
                    (port / "gid_attrs" / attribute / str(index)).unlink(missing_ok=True)
                write(port / "gids" / str(index), gid_of_ipv4(address) if address else ":".join(["0000"] * 8))
                if address:
                    write(port / "gid_attrs/types" / str(index), kind)
                    write(port / "gid_attrs/ndevs" / str(index), netdev)

    return change


def dmi(**attributes: str) -> Change:
    def change(root: Path) -> None:
        for name, text in attributes.items():
            write(root / "class/dmi/id" / name, text)

    return change


@dataclass(frozen=True)
class Case:
    """`stage`: cage, or words of the refusal or the first problem. `start`: devices and pin, or status and words."""

    ports: list[Port]
    stage: str
    start: str
    change: tuple[Change, ...] = ()
    nccl: str = ""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further addresses: netdev -> address."""


P0, P1 = "=rocep1s0f0:1,roceP2p1s0f0:1", "=rocep1s0f1:1,roceP2p1s0f1:1"
A, B = ("rocep1s0f0", "enp1s0f0np0"), ("roceP2p1s0f0", "enP2p1s0f0np0")
BARE = {"addresses": ()}
SLOW = {"speed": "100000"}
OEM = dmi(board_vendor="ASUSTeK COMPUTER INC.", product_name="GX10")
CASES = {
    "S1 one cable in p1": Case(ports("p1"), "p1", P1),
    "S1 one cable in p0": Case(ports("p0"), "p0", P0),
    "S2 hot-removed without a cable": Case([], "leaves the PCI bus while no cable is in", "11: no interface has the"),
    "S3 one twin without an address": Case(
        ports(roceP2p1s0f0=BARE), "p0", "11: no interface has the address 192.168.177.1"
    ),
    "S4 the other node's cable is in p1": Case(ports("p1"), "p1", P1),
    "S5 index 4 here, 3 there": Case(
        ports(), "p0", f"{P0} 4", (gids(*A, i3="", i5=""), gids(*B, i3="", i5=""), gids(*A, i4="192.168.176.1"),
                                   gids(*B, i4="192.168.177.1")), nccl="2.20.5",
    ),
    "S5 a recent library takes no pin": Case(ports(), "p0", P0, nccl="2.21.5"),
    "S6 {3, 5} and {4, 5} share 5": Case(
        ports(), "p0", f"{P0} 5",
        (gids(*A, i5="192.168.176.9"), gids(*B, i3=""), gids(*B, i4="192.168.177.1"), gids(*B, i6="192.168.177.9"),
         lambda root: write(root / "class/infiniband" / B[0] / "ports/1/gid_attrs/types/5", "RoCE v2")),
        nccl="2.20.5", more={A[1]: "192.168.176.9", B[1]: "192.168.177.9"},
    ),
    "S6 {3} and {4} share none": Case(
        ports(), "p0", "14: no GID index is valid on every device", (gids(*B, i3=""), gids(*B, i4="192.168.177.1")),
        nccl="2.20.5",
    ),
    "S7 two PCIe lanes": Case(ports(roceP2p1s0f0={"link_width": "2"}), "fwupdmgr update", P0),
    "S8 100 Gb/s through a switch": Case(ports(rocep1s0f0=SLOW, roceP2p1s0f0=SLOW), "autonegotiation off", P0),
    # show_gids leaves the IPv4 column of link-local rows blank; sysfs has a file for each fact, so nothing shifts.
    "S22 a twin with link-local GIDs alone": Case(
        ports(roceP2p1s0f0=BARE), "p0", "13: roceP2p1s0f0 has no RoCE v2 GID of an IPv4", more={B[1]: "192.168.177.1"}
    ),
    "S23 the devices in the other order": Case(ports(reverse=True), "p0", P0),
    "OEM unit": Case(ports(), "p0", P0, (OEM,)),
    "OEM unit with two PCIe lanes": Case(
        ports(roceP2p1s0f0={"link_width": "2"}), "the update from ASUSTeK COMPUTER INC.", P0, (OEM,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_scenario(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for port in case.ports:
        write_netdev(tmp_path, port, live=False)
        write_hca(tmp_path, port)
    for change in case.change:
        change(tmp_path)
    addresses = {port.netdev: list(port.addresses) for port in case.ports}
    for netdev, address in case.more.items():
        addresses[netdev].append(address)
    links = [
        {"ifname": n, "flags": ["UP"], "addr_info": [{"family": "inet", "local": a, "prefixlen": 24} for a in here]}
        for n, here in addresses.items()
    ]
    try:
        fabric = read_fabric(tmp_path, links, [], subnet=SUBNET, rank=0, names=("spark-a", "spark-b"))
        said = next(iter(fabric.problems), fabric.cage)
    except FabricError as error:
        said = str(error)
    assert said == case.stage or (len(case.stage) > 2 and case.stage in said), said

    plan = Plan(("192.168.176.1", "192.168.177.1"), "192.168.176.1", SUBNET, nccl=case.nccl)
    try:
        found = resolve.resolve(plan, addresses, read_devices(tmp_path, addresses))
        chosen = " ".join(filter(None, (found["NCCL_IB_HCA"], found.get("NCCL_IB_GID_INDEX"))))
    except ResolveError as error:
        chosen = f"{error.status}: {error}"
    assert chosen == case.start or (not case.start.startswith("=") and case.start in chosen), chosen
