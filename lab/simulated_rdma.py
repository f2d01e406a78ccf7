"""A simulated sysfs tree of a DGX Spark's ConnectX-7, for machines that have none.

The lab's nodes own real interfaces with the right names, but no RDMA device. This file makes the missing part
of sysfs as ordinary files, shaped as the kernel writes them. Whatever the kernel knows about the real
interface (carrier, MTU, address, flags, counters) stays a link to the real sysfs, so it is true in the node.

Unused GID slots read as zeros and have no type and no netdev: the kernel answers EINVAL there, which no
ordinary file can do, so those files are missing. Readers must treat both the same.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

MARKER = "SIMULATED"
"""Name of the file in the root of every tree that says what the tree is."""

LIVE = ("carrier", "operstate", "mtu", "address", "flags", "statistics")
"""What is linked to the real interface instead of being simulated."""

GID_SLOTS = 8
"""Slots that are written; the kernel shows 256, all but the first few empty."""

FIRST_NETWORK = 176
"""Third byte of rail 0's addresses, 192.168.x, in the simulated GID tables: the default plan's networks."""


@dataclass(frozen=True)
class Port:
    """One PCI function of the adapter: its netdev, its RDMA device and what sysfs says about them.

    `carrier` is the text of that file: "1" link, "0" no link, None unreadable (administratively down).
    `speed` is in Mb/s, `mtu` in bytes, `addresses` are IPv4 addresses that have a GID.
    """

    netdev: str
    hca: str
    pci: str
    port_name: str | None
    carrier: str | None = "0"
    speed: str | None = "-1"
    mtu: int = 1500
    mac: str = "4c:bb:47:00:01:01"
    addresses: tuple[str, ...] = ()
    link_width: str = "4"
    switch_id: str = field(default="4cbb47000001")


def spark_ports(node_index: int, cabled: str = "p0") -> list[Port]:
    """The four functions of node `node_index` (0 is the head) with the cable in cage `cabled`.

    In a "ring" both cages are cabled; cable n joins p0 of node n to p1 of the next, and has networks of its own.
    """
    ports = []
    for function in (0, 1):
        for twin, (domain, prefix) in enumerate((("0000", ""), ("0002", "P2"))):
            up = cabled in (f"p{function}", "ring")
            cable = (node_index - function) % 3 if cabled == "ring" else 0
            network = f"192.168.{FIRST_NETWORK + 2 * cable + twin}"
            ports.append(
                Port(
                    netdev=f"en{prefix}p1s0f{function}np{function}",
                    hca=f"roce{prefix}p1s0f{function}",
                    pci=f"{domain}:01:00.{function}",
                    port_name=f"p{function}",
                    carrier="1" if up else "0",
                    speed="200000" if up else "-1",
                    mac=f"4c:bb:47:00:{node_index + 1:02x}:{2 * function + twin + 1:02x}",
                    addresses=(f"{network}.{node_index + 1}",) if up else (),
                    switch_id=f"4cbb4700{node_index + 1:04x}",
                )
            )
    return ports


def write(path: Path, text: str) -> None:
    """Write one sysfs attribute: the text and the newline that the kernel adds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def gid_of_mac(mac: str) -> str:
    """The default GID that the kernel derives from a MAC (EUI-64), with or without an IPv6 address."""
    b = [int(byte, 16) for byte in mac.split(":")]
    tail = [b[0] ^ 2, b[1], b[2], 0xFF, 0xFE, b[3], b[4], b[5]]
    return "fe80:0000:0000:0000:" + ":".join(f"{tail[i]:02x}{tail[i + 1]:02x}" for i in range(0, 8, 2))


def gid_of_ipv4(address: str) -> str:
    """The GID of an IPv4 address, in the kernel's uncompressed form."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def write_netdev(root: Path, port: Port, live: bool) -> None:
    """Write class/net/<netdev>; with `live` what the kernel knows is linked to the real interface."""
    net = root / "class/net" / port.netdev
    net.mkdir(parents=True, exist_ok=True)
    if live:
        for name in LIVE:
            (net / name).symlink_to(f"/sys/class/net/{port.netdev}/{name}")
    else:
        up = port.carrier == "1"
        if port.carrier is not None:
            write(net / "carrier", port.carrier)
        write(net / "operstate", "up" if up else "down")
        write(net / "mtu", str(port.mtu))
        write(net / "address", port.mac)
        write(net / "flags", "0x1002" if port.carrier is None else "0x1003")
    if port.port_name is not None:
        write(net / "phys_port_name", port.port_name)
    write(net / "phys_switch_id", port.switch_id)
    if port.speed is not None:
        write(net / "speed", port.speed)
    device = root / "devices" / port.pci
    (device / "net" / port.netdev).mkdir(parents=True, exist_ok=True)
    write(device / "current_link_width", port.link_width)
    write(device / "current_link_speed", "32.0 GT/s PCIe")
    (net / "device").symlink_to(Path("../../../devices") / port.pci)


def write_hca(root: Path, port: Port) -> None:
    """Write class/infiniband/<hca>."""
    up = port.carrier == "1"
    hca = root / "class/infiniband" / port.hca
    write(hca / "fw_ver", "28.45.4028")
    write(hca / "node_guid", gid_of_mac(port.mac)[20:])
    (hca / "device").symlink_to(Path("../../../devices") / port.pci)
    one = hca / "ports/1"
    write(one / "state", "4: ACTIVE" if up else "1: DOWN")
    write(one / "phys_state", "5: LinkUp" if up else "3: Disabled")
    write(one / "rate", "200 Gb/sec (2X NDR)" if up else "40 Gb/sec (4X QDR)")
    write(one / "link_layer", "Ethernet")
    gids = [gid_of_mac(port.mac), *(gid_of_ipv4(address) for address in port.addresses)]
    for slot in range(GID_SLOTS):
        if slot < 2 * len(gids):
            write(one / "gids" / str(slot), gids[slot // 2])
            write(one / "gid_attrs/types" / str(slot), "RoCE v2" if slot % 2 else "IB/RoCE v1")
            write(one / "gid_attrs/ndevs" / str(slot), port.netdev)
        else:
            write(one / "gids" / str(slot), ":".join(["0000"] * 8))
    for counter in ("port_xmit_data", "port_rcv_data", "port_rcv_errors", "symbol_error", "link_downed"):
        write(one / "counters" / counter, "0")


def write_management(root: Path) -> None:
    """Write class/net/enP7s7, the RJ45 port: no RDMA device and no phys_port_name."""
    net = root / "class/net/enP7s7"
    net.mkdir(parents=True)
    for name in LIVE:
        (net / name).symlink_to(f"/sys/class/net/enP7s7/{name}")
    write(net / "speed", "10000")
    (root / "devices/0007:01:00.0/net/enP7s7").mkdir(parents=True)
    (net / "device").symlink_to("../../../devices/0007:01:00.0")


def write_tree(root: Path, node_index: int, cabled: str = "p0") -> None:
    """Make the whole tree for lab node `node_index` (0 is the head) at `root`; an earlier one is replaced.

    Raises FileExistsError when `root` holds anything that this function did not make.
    """
    if root.exists():
        if any(root.iterdir()) and not (root / MARKER).is_file():
            raise FileExistsError(f"{root} is not a simulated sysfs tree: not touched")
        shutil.rmtree(root)
    write(
        root / MARKER,
        "Simulated ConnectX-7, made by lab/simulated_rdma.py. Not a real adapter.",
    )
    for port in spark_ports(node_index, cabled):
        write_netdev(root, port, live=True)
        write_hca(root, port)
    write_management(root)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: simulated_rdma.py ROOT NODE_INDEX [p0|p1|ring]")
    write_tree(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
