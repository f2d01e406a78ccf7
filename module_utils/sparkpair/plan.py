"""The address plan of the fabric: one subnet in, one /24 per rail out. Pure: no files, no network.

A rail is one of the two PCIe paths (twins) of the cabled QSFP cage. Twins share one physical link, so each
rail gets a network of its own: with one network for both, the kernel may answer on the wrong twin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

RAIL_PREFIX = 24
"""Prefix length of a rail. A /24 keeps the host number readable (rank + 1) and holds 254 nodes."""

MAX_NODES = 2 ** (32 - RAIL_PREFIX) - 2
"""Host numbers of one rail, without the network and the broadcast address."""

RING = 3
"""Nodes of a ring: with three, every two are neighbours; more would need routing that NCCL does not do here."""

MTU_MIN = 1280
"""Smallest link MTU that IPv6 allows (RFC 8200, section 5); anything below is a typing mistake."""

MTU_MAX = 9216
"""Largest frame that common 200G switches pass; ConnectX-7 itself allows 9978."""


class PlanError(ValueError):
    """The addresses or the MTU in the inventory cannot work; the text says what to write instead."""


@dataclass(frozen=True)
class RailPlan:
    """The network of one rail and the address of every rank on it."""

    rail: int
    network: ipaddress.IPv4Network

    def address(self, rank: int) -> str:
        """Address of `rank` (0 is the head) without prefix: host number `rank` + 1.

        Raises PlanError when the rail has no such host number.
        """
        if not 0 <= rank < MAX_NODES:
            raise PlanError(f"rank {rank} has no address on {self.network}: ranks 0 to {MAX_NODES - 1} fit")
        return str(self.network[rank + 1])

    def interface(self, rank: int) -> str:
        """Address of `rank` with the prefix length, as netplan wants it: "192.168.176.1/24"."""
        return f"{self.address(rank)}/{self.network.prefixlen}"


def parse_subnet(subnet: str) -> ipaddress.IPv4Network:
    """Read `fabric_subnet`. Raises PlanError when it is not an IPv4 network that hosts may use."""
    want = "write an IPv4 network such as 192.168.176.0/23"
    if not isinstance(subnet, str) or "/" not in subnet:
        raise PlanError(f"fabric_subnet {subnet!r} is not a network: {want}")
    try:
        network = ipaddress.IPv4Network(subnet.strip())
    except ValueError as error:
        try:
            nearest = ipaddress.IPv4Network(subnet.strip(), strict=False)
        except ValueError:
            raise PlanError(f"fabric_subnet {subnet!r} is not a network: {want}") from error
        raise PlanError(f"fabric_subnet {subnet!r} is an address in a network: write {nearest}") from error
    ends = (network.network_address, network.broadcast_address)
    for kind in ("multicast", "loopback", "link_local", "reserved", "unspecified"):
        if any(getattr(end, f"is_{kind}") for end in ends):
            raise PlanError(f"fabric_subnet {network} is {kind.replace('_', '-')}, which no host can use: {want}")
    return network


def rail_plan(subnet: str, rails: int, nodes: int, taken: Mapping[str, str] | None = None) -> list[RailPlan]:
    """Split `subnet` into one /24 per rail, in order.

    `taken` maps a name for messages ("spark-a enP7s7") to an address or network in use elsewhere
    ("10.77.0.1/24", "10.77.0.1"); host names are passed over, because only the node can resolve them.
    Raises PlanError when the subnet is not a network, too small, or overlaps one that is taken.
    """
    if rails < 1 or nodes < 1:
        raise PlanError(f"a fabric needs at least one rail and one node, not {rails} and {nodes}")
    network = parse_subnet(subnet)
    # The smallest power of two that holds every rail.
    needed = RAIL_PREFIX - (rails - 1).bit_length()
    if network.prefixlen > needed:
        raise PlanError(
            f"fabric_subnet {network} is too small: {rails} rails need one /{RAIL_PREFIX} each, so write a /{needed}"
        )
    if nodes > MAX_NODES:
        raise PlanError(f"{nodes} nodes do not fit: a rail is a /{RAIL_PREFIX} and holds {MAX_NODES}")
    for name, other in overlaps(network, taken or {}).items():
        raise PlanError(f"fabric_subnet {network} overlaps {other} ({name}): choose a network that nothing else uses")
    blocks = network.subnets(new_prefix=RAIL_PREFIX)
    return [RailPlan(rail, next(blocks)) for rail in range(rails)]


def ring_neighbours(rank: int, nodes: int) -> tuple[int, int]:
    """The ranks at the other ends of port 0 and port 1: port 0 of each node leads to port 1 of the next.

    Raises PlanError for a number of nodes that cannot be a ring.
    """
    if nodes != RING:
        raise PlanError(f"{nodes} nodes are no ring: fabric_topology ring takes {RING}, anything else a switch")
    return (rank + 1) % nodes, (rank - 1) % nodes


def overlaps(network: ipaddress.IPv4Network, taken: Mapping[str, str]) -> dict[str, str]:
    """The entries of `taken` that share an address with `network`: name -> network."""
    found = {}
    for name, text in taken.items():
        try:
            other = ipaddress.ip_interface(text).network
        except ValueError:
            continue
        if isinstance(other, ipaddress.IPv4Network) and other.overlaps(network):
            found[name] = str(other)
    return found


def check_mtu(mtu: int) -> int:
    """Return `mtu` (bytes) when rails can use it. Raises PlanError otherwise."""
    if isinstance(mtu, bool) or not isinstance(mtu, int) or not MTU_MIN <= mtu <= MTU_MAX:
        raise PlanError(
            f"fabric_mtu {mtu!r} is not between {MTU_MIN} and {MTU_MAX}: "
            "write 9000, or 1500 where a switch passes no jumbo frames"
        )
    return mtu
