"""The lab's network: namespaces, and the cables between them.

Every cable is a veth pair that lives as long as the lab. While a node is off, its ends wait in the park namespace; a
boot gives the node a brand-new namespace and moves the ends in. So nothing that a boot must persist (addresses,
routes, sysctls, nftables) can survive in the kernel by accident, and the other node loses its carrier meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path

from lab import host
from lab.settings import EMPTY_CAGE, INTERFACES, MANAGEMENT, MANAGEMENT_NETWORK, RAILS, LabError, Node, Settings

NAMES = Path("/run/netns")
MTU = 1500
"""MTU of an interface that nobody has configured."""


def exists(namespace: str) -> bool:
    return (NAMES / namespace).exists()


def names(settings: Settings) -> list[str]:
    """Names of the lab's namespaces that exist."""
    return sorted(file.name for file in NAMES.glob(f"{settings.name}-*") if settings.owns(file.name))


def ip(namespace: str, *lines: str) -> None:
    """Run `ip` commands in `namespace` in one go."""
    host.run(["ip", "-n", namespace, "-batch", "-"], stdin="\n".join(lines) + "\n")


def add_namespace(name: str) -> None:
    host.run(["ip", "netns", "add", name])
    ip(name, "link set lo up")


def delete_namespace(name: str) -> None:
    """Delete `name` with the interfaces in it; also a name whose namespace is already gone."""
    if not host.attempt(["ip", "netns", "delete", name]):
        (NAMES / name).unlink(missing_ok=True)


def cable_commands(settings: Settings) -> list[str]:
    """`ip` commands that lay all cables in the park namespace.

    Two nodes are joined back to back. With three, each rail is a bridge, or, in a ring, the first cage of each node
    is joined to the second of the next. The empty cage has the other end of its veth down, so it never has a carrier.
    """
    if settings.ring:
        return _ring_commands(settings)
    lines = []
    for node in settings.nodes:
        lines.append(_cable(node, MANAGEMENT, f"m{node.index}"))
        for interface in EMPTY_CAGE:
            lines.append(_cable(node, interface, f"x{node.index}{EMPTY_CAGE.index(interface)}"))
    for rail, interface in enumerate(RAILS):
        if len(settings.nodes) == 2:
            one, two = settings.nodes
            lines.append(
                f"link add {one.parked(interface)} address {one.mac(interface)} type veth"
                f" peer name {two.parked(interface)} address {two.mac(interface)}"
            )
            continue
        lines.append(f"link add rail{rail} type bridge forward_delay 0")
        lines.append(f"link set rail{rail} mtu 9000 addrgenmode none up")
        for node in settings.nodes:
            lines.append(_cable(node, interface, f"r{node.index}{rail}"))
            lines.append(f"link set r{node.index}{rail} master rail{rail} mtu 9000 addrgenmode none up")
    return lines


def _ring_commands(settings: Settings) -> list[str]:
    lines = []
    for node in settings.nodes:
        following = settings.nodes[(node.index + 1) % len(settings.nodes)]
        lines.append(_cable(node, MANAGEMENT, f"m{node.index}"))
        for interface, other in zip(RAILS, EMPTY_CAGE, strict=True):
            lines.append(
                f"link add {node.parked(interface)} address {node.mac(interface)} type veth"
                f" peer name {following.parked(other)} address {following.mac(other)}"
            )
    return lines


def _cable(node: Node, interface: str, peer: str) -> str:
    return f"link add {node.parked(interface)} address {node.mac(interface)} type veth peer name {peer}"


def lay(settings: Settings) -> None:
    """Make the lab's own namespaces and all cables."""
    lab, park = settings.lab_namespace, settings.park_namespace
    add_namespace(lab)
    add_namespace(park)
    ip(park, *cable_commands(settings))
    ip(
        lab,
        "link add br0 type bridge forward_delay 0",
        "link set br0 address 02:77:00:00:00:fe",
        f"address add {MANAGEMENT_NETWORK}.254/24 dev br0",
        "link set br0 up",
    )
    for node in settings.nodes:
        ip(park, f"link set m{node.index} netns {lab}")
        ip(lab, f"link set m{node.index} master br0 up")


def interfaces(namespace: str) -> set[str]:
    """Names of the interfaces in `namespace`."""
    listing = json.loads(host.run(["ip", "-json", "-n", namespace, "link", "show"]) or "[]")
    return {link["ifname"] for link in listing if link}


def is_sound(settings: Settings) -> bool:
    """Whether all cables are there with every end in the park: true after every node was unplugged."""
    if not exists(settings.lab_namespace) or not exists(settings.park_namespace):
        return False
    for node in settings.nodes:
        unplug(settings, node)
    ends = {node.parked(interface) for node in settings.nodes for interface in INTERFACES}
    return ends <= interfaces(settings.park_namespace)


def unplug(settings: Settings, node: Node) -> None:
    """Move the node's cable ends to the park and delete its namespace; fine if there is none."""
    namespace = settings.namespace(node)
    if not exists(namespace):
        return
    present = interfaces(namespace)
    for interface in INTERFACES:
        if interface in present:
            ip(namespace, f"link set {interface} down")
            ip(namespace, f"link set {interface} name {node.parked(interface)} netns {settings.park_namespace}")
    delete_namespace(namespace)


def plug_in(settings: Settings, node: Node) -> None:
    """Give the node a new namespace with its interfaces, unconfigured."""
    unplug(settings, node)
    parked = interfaces(settings.park_namespace)
    lost = [interface for interface in INTERFACES if node.parked(interface) not in parked]
    if lost:
        raise LabError(f"{node.name}: cable ends are lost: {', '.join(lost)}; run `lab.py reset`")
    namespace = settings.namespace(node)
    add_namespace(namespace)
    for interface in INTERFACES:
        ip(
            settings.park_namespace,
            f"link set {node.parked(interface)} name {interface} netns {namespace} mtu {MTU}",
        )


def remove(settings: Settings) -> None:
    """Delete every namespace of the lab; the cables go with them."""
    for name in names(settings):
        delete_namespace(name)
