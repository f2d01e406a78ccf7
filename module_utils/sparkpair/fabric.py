"""Read the fabric of one node: cages, twins, RDMA devices and addresses; choose the cage with the cable.

Everything comes from sysfs and from the JSON of `ip`, both handed in, so a test gives a folder and two lists.
An attribute that cannot be read (EINVAL, EOPNOTSUPP) counts as absent: the kernel answers so for `carrier` of
an interface that is down and for unused GID slots.

A Spark has one ConnectX-7 with two QSFP cages, `p0` and `p1`. Each cage has two PCI functions, the twins,
which share the cable: `enp1s0f0np0` and `enP2p1s0f0np0` are cage p0. A rail is one twin of the cage in use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.fabric_guard import ipv4_addresses
from ansible.module_utils.sparkpair.plan import PlanError, RailPlan, rail_plan, ring_neighbours

RAILS = 2
"""Twins of one cage."""

FULL_SPEED = 200_000
"""Mb/s that both twins of a healthy link report in sysfs."""

FULL_WIDTH = 4
"""PCIe lanes of each function; firmware from before April 2026 brings one of them up with 2."""

FOUNDERS = "NVIDIA"
"""Board vendor of NVIDIA's own units in DMI. OEM units have the same ports and names, and get firmware later."""

FULL_PCIE = "32.0 GT/s"
"""PCIe speed of each function, as sysfs begins it (Gen5)."""

MELLANOX = "0x15b3"
"""PCI vendor of the ConnectX-7."""

Probe = Callable[[Sequence["Port"]], Mapping[str, set[str]]]
"""Asks over ports who is at the other end: netdev -> names of the peers that answer."""

_NAME = re.compile(r"^en(?:p|P2p)1s0f([01])np\1$")
_PORT = re.compile(r"^p\d+$")
_PCI = re.compile(r"^([0-9a-f]{4,}):[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


RING_ENVIRONMENT = {"NCCL_IB_MERGE_NICS": "0", "NCCL_NET_PLUGIN": "none", "NCCL_IB_SUBNET_AWARE_ROUTING": "1"}
"""What NCCL needs in a ring of three (NVIDIA's playbook for three Sparks)."""


class FabricError(ValueError):
    """The fabric cannot be used as it is; the text says what was found and what mends it."""


@dataclass(frozen=True)
class Gid:
    """One GID of an RDMA port: its index, its text, "RoCE v2" or "IB/RoCE v1", and the interface that it is for."""

    index: int
    gid: str
    type: str
    netdev: str


@dataclass(frozen=True)
class Port:
    """One network interface of the adapter.

    `carrier` is None when the kernel does not tell, which it does only for an interface that is up.
    `speed` is in Mb/s, `mtu` in bytes, `link_width` in PCIe lanes; None when unknown. `addresses` are IPv4
    with prefix length. `hca` is the RDMA device on the same PCI function, `port_state` ("ACTIVE"), `link_layer` and
    `gids` are what it says of its port; `switch_id` is the same for twins.
    """

    netdev: str
    cage: str
    domain: str
    hca: str | None
    up: bool
    carrier: bool | None
    speed: int | None
    mtu: int | None
    link_width: int | None
    mac: str | None
    addresses: tuple[str, ...]
    link_speed: str | None = None
    switch_id: str | None = None
    port_state: str | None = None
    link_layer: str | None = None
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True)
class Rail:
    """One twin of the chosen cage with its planned addresses.

    `addresses_by_rank` are without prefix, and empty for ranks that are not on this rail (in a ring).
    """

    rail: int
    netdev: str
    hca: str
    mac: str | None
    carrier: bool
    mtu: int | None
    speed: int | None
    addresses: tuple[str, ...]
    address: str
    addresses_by_rank: tuple[str, ...]


@dataclass(frozen=True)
class Fabric:
    """What a node's fabric is, and what is not as it should be (`problems`, one sentence each).

    `environment` are the variables that NCCL needs for this topology, none for a pair or a switch. `meeting` is the
    address, without prefix, at which all ranks reach this one, and its interface: rail 0's, in a ring the management
    network's. `vendor` is the board's in DMI, empty when unknown.
    """

    cage: str
    rails: tuple[Rail, ...]
    cages: dict[str, tuple[Port, ...]]
    default_route_interfaces: tuple[str, ...]
    problems: tuple[str, ...]
    foreign_addresses: dict[str, tuple[str, ...]]
    environment: dict[str, str]
    meeting: dict[str, str]
    vendor: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `exit_json`."""
        return asdict(self)


def attribute(path: Path) -> str | None:
    """Text of a sysfs attribute without surrounding space; None when it is absent, unreadable or empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A sysfs attribute as a number; None when absent or not a number above zero (the kernel's -1)."""
    text = attribute(path) or ""
    return int(text) if text.isdigit() and int(text) > 0 else None


def entries(folder: Path) -> list[Path]:
    """What a sysfs folder holds, sorted by name; nothing when it is absent."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def rdma_devices(sysfs_root: Path) -> dict[str, str]:
    """RDMA device of each network interface: netdev -> hca."""
    return {
        netdev.name: hca.name
        for hca in entries(sysfs_root / "class/infiniband")
        for netdev in entries(hca / "device/net")
    }


def rdma_port(sysfs_root: Path, hca: str | None) -> dict[str, Any]:
    """State, link layer and GIDs of the only port of an RDMA device; empty slots of its GID table are left out."""
    if hca is None:
        return {}
    port = sysfs_root / "class/infiniband" / hca / "ports/1"
    slots = sorted((slot for slot in entries(port / "gids") if slot.name.isdigit()), key=lambda slot: int(slot.name))
    gids = [
        Gid(int(slot.name), gid, kind, attribute(port / "gid_attrs/ndevs" / slot.name) or "")
        for slot in slots
        if (gid := attribute(slot)) and (kind := attribute(port / "gid_attrs/types" / slot.name))
    ]
    state = attribute(port / "state")
    return {
        "port_state": state.split(": ")[-1] if state else None,
        "link_layer": attribute(port / "link_layer"),
        "gids": tuple(gids),
    }


def default_route_interfaces(routes: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Interfaces of the default routes in the output of `ip -j route`, several paths included."""
    hops = [hop for route in routes if route.get("dst") == "default" for hop in (route, *route.get("nexthops", []))]
    return tuple(sorted({str(hop["dev"]) for hop in hops if "dev" in hop}))


def read_ports(sysfs_root: Path, links: Sequence[Mapping[str, Any]]) -> list[Port]:
    """All network interfaces of the adapter. `links` is the output of `ip -j addr`."""
    hcas = rdma_devices(sysfs_root)
    by_name = {str(link.get("ifname")): link for link in links}
    ports = []
    for net in entries(sysfs_root / "class/net"):
        port_name = attribute(net / "phys_port_name")
        by_pattern = _NAME.match(net.name)
        if port_name is None and by_pattern:
            port_name = f"p{by_pattern.group(1)}"
        if port_name is None or not _PORT.match(port_name):
            continue
        if attribute(net / "device/vendor") not in (None, MELLANOX):
            continue
        link = by_name.get(net.name, {})
        carrier = attribute(net / "carrier")
        ports.append(
            Port(
                netdev=net.name,
                cage=port_name,
                domain=pci_domain(net),
                hca=hcas.get(net.name),
                up="UP" in link.get("flags", []) or carrier is not None,
                carrier=None if carrier is None else carrier == "1",
                speed=number(net / "speed"),
                mtu=number(net / "mtu"),
                link_width=number(net / "device/current_link_width"),
                mac=attribute(net / "address"),
                addresses=ipv4_addresses(link),
                link_speed=attribute(net / "device/current_link_speed"),
                switch_id=attribute(net / "phys_switch_id"),
                **rdma_port(sysfs_root, hcas.get(net.name)),
            )
        )
    return ports


def pci_domain(net: Path) -> str:
    """PCI domain of an interface ("0000", "0002"): from its device link, else from the P2 in its name."""
    match = _PCI.match((net / "device").resolve().name)
    if match:
        return match.group(1)
    return "0002" if "P2" in net.name else "0000"


def group_cages(ports: Iterable[Port]) -> dict[str, tuple[Port, ...]]:
    """Ports by cage, twins in the order of their PCI domain."""
    cages: dict[str, list[Port]] = {}
    for port in sorted(ports, key=lambda port: (port.cage, port.domain, port.netdev)):
        cages.setdefault(port.cage, []).append(port)
    return {cage: tuple(twins) for cage, twins in cages.items()}


def describe(cage: str, twins: Sequence[Port]) -> str:
    """One cage in words: "p0 (enp1s0f0np0 link, enP2p1s0f0np0 no link)"."""
    words = {True: "link", False: "no link", None: "carrier unknown"}
    return f"{cage} ({', '.join(f'{t.netdev} ' + (words[t.carrier] if t.up else 'is down') for t in twins)})"


def raise_command(ports: Iterable[Port]) -> str:
    """The command that raises every port that is administratively down."""
    return "; ".join(f"ip link set dev {port.netdev} up" for port in ports if not port.up)


def unusable(cage: str, twins: Sequence[Port], default_route: Iterable[str]) -> str | None:
    """Why a cage cannot carry the fabric, with the remedy; None when it can."""
    here = describe(cage, twins)
    routed = [port.netdev for port in twins if port.netdev in set(default_route)]
    linked = [port for port in twins if port.carrier]
    if routed:
        return f"cage {here} carries the default route on {routed[0]}: the fabric needs a cage of its own"
    if len(twins) > RAILS:
        return f"cage {here} has {len(twins)} interfaces instead of {RAILS}: rename or remove what is not a twin"
    if len({port.switch_id for port in twins} - {None}) > 1:
        return f"cage {here} joins two adapters (phys_switch_id): remove the one that is not the Spark's"
    if linked and len(twins) < RAILS:
        return (
            f"cage {here} shows only one of its two twins: the other PCI function is missing, "
            "so power both nodes off, wait a minute and start them with the cable attached"
        )
    if len(linked) == RAILS:
        return None
    if any(not port.up for port in twins):
        return f"cage {here} cannot be judged, because a port that is down shows no link: {raise_command(twins)}"
    if linked:
        return f"cage {here} has a link on one twin only: reseat the cable at both ends, then restart both nodes"
    return f"cage {here} has no link: seat the QSFP cable at both ends and see that the other node is on"


def choose_cage(
    cages: Mapping[str, Sequence[Port]],
    default_route: Iterable[str] = (),
    wanted: str = "",
    planned: Iterable[str] = (),
    probe: Probe | None = None,
) -> str:
    """The cage that carries the fabric: `wanted`, else the only one with a link on both twins.

    Of two with a link, the one that has the `planned` addresses already, else the one where the peers answer to
    `probe`. Raises FabricError when there is none, when two are left, or when `wanted` cannot be used.
    """
    if not cages:
        raise FabricError(
            "no ConnectX-7 interface: the adapter leaves the PCI bus while no cable is in, "
            "so plug the QSFP cable in at both ends, wait 10 seconds and run again"
        )
    if wanted and wanted not in cages:
        raise FabricError(f"fabric_cage is {wanted!r}, but this node has {' and '.join(sorted(cages))}")
    reasons = {cage: unusable(cage, twins, default_route) for cage, twins in cages.items()}
    if wanted:
        if reasons[wanted]:
            raise FabricError(f"fabric_cage is {wanted!r}, but {reasons[wanted]}")
        return wanted
    usable = sorted(cage for cage, reason in reasons.items() if reason is None)
    if len(usable) > 1:
        return choose_linked({cage: cages[cage] for cage in usable}, set(planned), probe)
    if not usable:
        # A half working cage is nearer to the mark than an empty one: its reason alone is worth reading.
        partly = [cage for cage, twins in cages.items() if any(port.carrier for port in twins)]
        raise FabricError("; ".join(str(reasons[cage]) for cage in sorted(partly or cages)))
    return usable[0]


def choose_linked(cages: Mapping[str, Sequence[Port]], planned: set[str], probe: Probe | None) -> str:
    """The one of several linked cages that leads to the peers. Raises FabricError that names them all."""
    configured = [cage for cage, twins in cages.items() if all(planned & set(port.addresses) for port in twins)]
    if len(configured) == 1:
        return configured[0]
    seen = probe([port for twins in cages.values() for port in twins]) if probe else {}
    peers = {cage: sorted(set().union(*(seen.get(port.netdev, ()) for port in twins))) for cage, twins in cages.items()}
    leading = [cage for cage, found in peers.items() if found]
    if len(leading) == 1:
        return leading[0]
    both = " and ".join(
        f"{describe(cage, twins)}{', where ' + ' and '.join(peers[cage]) + ' answers' if peers[cage] else ''}"
        for cage, twins in cages.items()
    )
    nobody = "" if leading or not probe else "; no other node answers on either, so is it on, and are its ports up?"
    raise FabricError(f"both cages have a cable: {both}; set fabric_cage to {' or '.join(cages)} for this node{nobody}")


def peer_addresses(subnet: str, rank: int, names: Sequence[str], hosts: Sequence[str]) -> dict[str, list[str]]:
    """Every address by which a peer can be asked for: the planned ones, and its management address or name."""
    plans = rail_plan(subnet, RAILS, len(names))
    found = {}
    for other, name in enumerate(names):
        if other != rank:
            planned = [plan.address(other) for plan in plans]
            found[name] = [*planned, *(host for host in hosts[other : other + 1] if host)]
    return found


def degraded(twins: Iterable[Port], vendor: str = FOUNDERS) -> list[str]:
    """What makes the chosen twins slow although they have a link, with the remedy for a unit of `vendor`."""
    found = []
    oem = f", or the update from {vendor}, whose units get it later" if vendor not in ("", FOUNDERS) else ""
    for port in twins:
        if port.speed is not None and port.speed < FULL_SPEED:
            found.append(
                f"{port.netdev} runs at {port.speed} Mb/s instead of {FULL_SPEED}: use a 200G cable, "
                "and on a switch force 200G-baseCR4 with autonegotiation off"
            )
        if port.link_width is not None and port.link_width < FULL_WIDTH:
            found.append(
                f"{port.netdev} has {port.link_width} PCIe lanes instead of {FULL_WIDTH}: "
                f"update the firmware (fwupdmgr update{oem}) and restart the node"
            )
        if port.link_speed is not None and not port.link_speed.startswith(FULL_PCIE):
            found.append(
                f"{port.netdev} has a PCIe link of {port.link_speed} instead of {FULL_PCIE}: "
                "power the node off for a minute and start it with the cable attached"
            )
    return found


def taken_networks(
    cages: Mapping[str, Sequence[Port]],
    used: Iterable[str],
    links: Iterable[Mapping[str, Any]],
    routes: Iterable[Mapping[str, Any]],
    planned: Iterable[str],
) -> dict[str, str]:
    """Networks that this node uses outside the interfaces `used` by its fabric: description -> network.

    Ports of the other cage are passed over when they have no link or hold only `planned` addresses:
    the fabric was there before the cable was moved or another cage was asked for.
    """
    fabric = set(used)
    for port in (port for twins in cages.values() for port in twins):
        if not port.carrier or (port.addresses and set(port.addresses) <= set(planned)):
            fabric.add(port.netdev)
    taken = {}
    for link in links:
        name = str(link.get("ifname"))
        if name not in fabric:
            taken.update({f"{name} {address}": address for address in ipv4_addresses(link)})
    for route in routes:
        name, target = str(route.get("dev")), str(route.get("dst"))
        if name not in fabric and target != "default":
            taken[f"route through {name}"] = target
    return taken


def make_rails(
    twins: Sequence[Port], plans: Sequence[RailPlan], rank: int, nodes: int, members: Sequence[Sequence[int]] = ()
) -> tuple[Rail, ...]:
    """Join twins with the plan. `members` are the ranks on each rail; without it all are on every one.

    Raises FabricError when a twin has no RDMA device.
    """
    rails = []
    on_rail = members or [range(nodes)] * len(plans)
    for port, plan, ranks in zip(twins, plans, on_rail, strict=True):
        if port.hca is None:
            raise FabricError(f"{port.netdev} has no RDMA device: load the driver with: modprobe mlx5_ib")
        rails.append(
            Rail(
                rail=plan.rail,
                netdev=port.netdev,
                hca=port.hca,
                mac=port.mac,
                carrier=bool(port.carrier),
                mtu=port.mtu,
                speed=port.speed,
                addresses=port.addresses,
                address=plan.interface(rank),
                addresses_by_rank=tuple(plan.address(other) if other in ranks else "" for other in range(nodes)),
            )
        )
    return tuple(rails)


def ring_rails(
    cages: Mapping[str, Sequence[Port]],
    plans: Sequence[RailPlan],
    rank: int,
    names: Sequence[str],
    default_route: Iterable[str],
    probe: Probe | None,
) -> tuple[Rail, ...]:
    """The four rails of a node in a ring: port 0 leads to port 1 of the next node, each cable has two networks.

    Raises FabricError when a cage has no cable, or leads to another node than the plan says.
    """
    nodes = len(names)
    rails: list[Rail] = []
    for cage, peer, cable in zip(("p0", "p1"), ring_neighbours(rank, nodes), (rank, (rank - 1) % nodes), strict=True):
        twins = cages.get(cage, ())
        reason = unusable(cage, twins, default_route) if twins else f"cage {cage} is not there"
        if reason:
            raise FabricError(f"a ring needs both cages: {reason}")
        wanted = plans[RAILS * cable : RAILS * (cable + 1)]
        if probe and not all(plan.interface(rank) in port.addresses for port, plan in zip(twins, wanted, strict=True)):
            found = set().union(*probe(twins).values())
            if found - {names[peer]}:
                raise FabricError(
                    f"cage {describe(cage, twins)} leads to {' and '.join(sorted(found))} instead of {names[peer]}: "
                    "in a ring, port 0 of each node is cabled to port 1 of the next"
                )
        rails += make_rails(twins, wanted, rank, nodes, [(rank, peer)] * RAILS)
    return tuple(rails)


def ring_meeting(links: Iterable[Mapping[str, Any]], host: str, default_route: Sequence[str]) -> dict[str, str]:
    """Where ranks of a ring meet, because no rail reaches all of them: the management address of this node.

    It is `host` where that is an address here, else the one of the default route. Raises FabricError without either.
    """
    here = {a.split("/")[0]: str(link["ifname"]) for link in links for a in ipv4_addresses(link)}
    routed = [address for interface in default_route for address, netdev in here.items() if netdev == interface]
    address = host if host in here else next(iter(routed), "")
    if not address:
        raise FabricError(
            "ranks of a ring meet over the management network, but no interface has "
            f"{host or 'a default route'}: write the node's IPv4 address as its ansible_host"
        )
    return {"address": address, "netdev": here[address]}


def read_fabric(
    sysfs_root: Path,
    links: Sequence[Mapping[str, Any]],
    routes: Sequence[Mapping[str, Any]],
    *,
    subnet: str,
    rank: int,
    names: Sequence[str],
    hosts: Sequence[str] = (),
    cage: str = "",
    ring: bool = False,
    probe: Probe | None = None,
) -> Fabric:
    """Read a node's fabric, choose the cage and plan the addresses of all ranks.

    `links` and `routes` are the output of `ip -j addr` and `ip -j route`; `names` and `hosts` (management
    addresses) of all nodes in rank order. Raises FabricError when no cage can be chosen and PlanError when
    `subnet` does not fit this node.
    """
    nodes = len(names)
    if not 0 <= rank < nodes:
        raise PlanError(f"rank {rank} is not one of {nodes} nodes")
    count = RAILS * len(names) if ring and ring_neighbours(rank, nodes) else RAILS
    planned = [plan.interface(rank) for plan in rail_plan(subnet, count, nodes)]
    cages = group_cages(read_ports(sysfs_root, links))
    hcas = [hca.name for hca in entries(sysfs_root / "class/infiniband")]
    if hcas and not cages:
        raise FabricError(f"RDMA devices {', '.join(hcas)} have no network interface: run: modprobe mlx5_core")
    default_route = default_route_interfaces(routes)
    chosen = "ring" if ring and cages else choose_cage(cages, default_route, cage, planned, probe)
    used = {port.netdev for name, twins in cages.items() for port in twins if chosen in (name, "ring")}
    plans = rail_plan(subnet, count, nodes, taken_networks(cages, used, links, routes, planned))
    if ring:
        rails = ring_rails(cages, plans, rank, names, default_route, probe)
    else:
        rails = make_rails(cages[chosen], plans, rank, nodes)
    vendor = attribute(sysfs_root / "class/dmi/id/board_vendor") or ""
    first = {"address": rails[0].addresses_by_rank[rank], "netdev": rails[0].netdev}
    meeting = ring_meeting(links, next(iter(hosts[rank : rank + 1]), ""), default_route) if ring else first
    foreign = {rail.netdev: tuple(a for a in rail.addresses if a != rail.address) for rail in rails}
    return Fabric(
        cage=chosen,
        rails=rails,
        cages=cages,
        default_route_interfaces=default_route,
        problems=tuple(degraded((port for twins in cages.values() for port in twins if port.netdev in used), vendor)),
        foreign_addresses={netdev: addresses for netdev, addresses in foreign.items() if addresses},
        environment=RING_ENVIRONMENT if ring else {},
        meeting=meeting,
        vendor=vendor,
    )
