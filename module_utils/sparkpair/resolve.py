"""Resolve at every start what can change between boots: addresses, interface names, RDMA devices, GID indexes.

Standard library only and nothing of Ansible: a copy of this file lies on every node. Usage:
resolve.py CONFIG OUTPUT [COMMAND...]. CONFIG is JSON (see `Plan`). What was chosen goes to OUTPUT, an environment file
for people and for systemd, and into the environment of COMMAND, which takes this process's place: so the rank's agent
resolves before every generation of vLLM by starting one command. It says what it chose and why on its output, and ends
with a status of its own for each failure.

A GID index is not pinned unless it must be: NCCL 2.21 and newer choose one for each device, and a pin is one
number for all devices of a rank, wrong again after the next `netplan apply`.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USAGE, NO_INTERFACE, NO_ADDRESS, NO_DEVICE, NO_GID, NO_COMMON_GID, BAD_SELECTOR = 2, 10, 11, 12, 13, 14, 15
"""Exit statuses, one for each failure; docs/troubleshooting.md lists them."""

SELF_CHOOSING = (2, 21)
"""First NCCL that finds the GID itself when NCCL_IB_GID_INDEX is unset."""

MAX_ENTRIES, MAX_NAME = 32, 63
"""NCCL reads at most so many entries of a selector, and so many bytes of a name."""

MAX_PORT = 2**31 - 1

LINK_LAYERS = ("Ethernet", "InfiniBand")


class ResolveError(Exception):
    """The rank cannot start; `status` is the exit status, the text says what was found and what mends it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Plan:
    """What the serve role knows when it writes CONFIG.

    `addresses` of this node, rail 0 first, without prefix; all ranks reach it at `host`. `subnet` is the fabric's.
    `hca` is a selector in NCCL's grammar; empty takes the devices of the rails. `nccl` is the version of the library,
    empty for a recent one. `environment` is passed on.
    """

    addresses: tuple[str, ...]
    host: str
    subnet: str
    hca: str = ""
    nccl: str = ""
    wait_seconds: float = 60.0
    sysfs_root: str = "/sys"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Selector:
    """NCCL's `[^][=]name[:port[:rail[:plane]]][,...]`. A port of None fits any."""

    exclude: bool
    exact: bool
    entries: tuple[tuple[str, int | None], ...]

    def fits(self, name: str, port: int) -> bool:
        """Whether NCCL would take this port of this device. A selector without entries takes all."""
        found = not self.entries or any(
            (name == wanted if self.exact else name.startswith(wanted)) and number in (None, port)
            for wanted, number in self.entries
        )
        return found != self.exclude


@dataclass(frozen=True)
class Device:
    """One RDMA port: device name, port number, whether it is ACTIVE, its netdev and its IPv4 RoCE v2 GIDs.

    `gids` maps an index to the IPv4 address behind it, for addresses that the netdev has now.
    """

    name: str
    port: int
    active: bool
    netdev: str
    gids: Mapping[int, str]


def atoi(text: str) -> int:
    """C's atoi: leading blanks, a sign, digits; 0 for anything else. Clamped where C would overflow."""
    match = re.match(r"\s*([+-]?\d+)", text)
    return max(-MAX_PORT, min(MAX_PORT, int(match.group(1)))) if match else 0


def parse_selector(text: str) -> Selector:
    """Read a selector as NCCL does. Raises ResolveError for one that names nothing ("^", "=", ",")."""
    rest = text
    exclude = rest.startswith("^")
    rest = rest[1:] if exclude else rest
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    entries: list[tuple[str, int | None]] = []
    for part in rest.split(","):
        name, _, more = part.partition(":")
        if name and len(entries) < MAX_ENTRIES:
            port = more.split(":")[0]
            number = atoi(port) if port else None
            entries.append((name[:MAX_NAME], None if number == -1 else number))
    if text and not entries:
        raise ResolveError(
            BAD_SELECTOR, f"the device selector {text!r} names no device: write =rocep1s0f0,roceP2p1s0f0"
        )
    return Selector(exclude, exact, tuple(entries))


def attribute(path: Path) -> str:
    """Text of a sysfs attribute; empty when it is absent or unreadable (EINVAL for unused GID slots)."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def ipv4_of_gid(gid: str) -> str:
    """The IPv4 address that a GID stands for; empty when it stands for none."""
    try:
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return ""
    return str(mapped) if mapped else ""


def read_gids(port: Path, addresses: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """RoCE v2 GIDs of one port whose IPv4 address its netdev has: index -> address."""
    found = {}
    for slot in sorted((port / "gids").glob("*"), key=lambda path: (len(path.name), path.name)):
        if not slot.name.isdigit() or attribute(port / "gid_attrs/types" / slot.name) != "RoCE v2":
            continue
        address, netdev = ipv4_of_gid(attribute(slot)), attribute(port / "gid_attrs/ndevs" / slot.name)
        if address and address in addresses.get(netdev, ()):
            found[int(slot.name)] = address
    return found


def read_devices(sysfs_root: Path, addresses: Mapping[str, Sequence[str]]) -> list[Device]:
    """All RDMA ports of Ethernet or InfiniBand, by name. `addresses` maps a netdev to its IPv4 addresses."""
    devices = []
    for hca in sorted((sysfs_root / "class/infiniband").glob("*")):
        nets = sorted(path.name for path in (hca / "device/net").glob("*"))
        for port in sorted((hca / "ports").glob("*")):
            if attribute(port / "link_layer") not in LINK_LAYERS or not port.name.isdigit():
                continue
            netdev = attribute(port / "gid_attrs/ndevs/0") or (nets[0] if nets else "")
            active = attribute(port / "state").endswith("ACTIVE")
            devices.append(Device(hca.name, int(port.name), active, netdev, read_gids(port, addresses)))
    return devices


def parse_addresses(output: str) -> dict[str, list[str]]:
    """Interfaces and their IPv4 addresses in the output of `ip -j addr`."""
    return {
        link["ifname"]: [info["local"] for info in link.get("addr_info", []) if info.get("family") == "inet"]
        for link in json.loads(output or "[]")
        if link
    }


def find_interfaces(wanted: Sequence[str], addresses: Mapping[str, Sequence[str]]) -> list[str]:
    """The interface that has each of the `wanted` addresses now, in their order. Raises ResolveError."""
    found = []
    for address in wanted:
        netdevs = sorted(netdev for netdev, here in addresses.items() if address in here)
        if not netdevs:
            known = ", ".join(f"{n} {' '.join(a)}" for n, a in sorted(addresses.items()) if a and n != "lo")
            raise ResolveError(
                NO_ADDRESS,
                f"no interface has the address {address} (found {known or 'no address at all'}): "
                "see that the cable is in, then run playbooks/fabric.yml",
            )
        if len(netdevs) > 1:
            raise ResolveError(
                NO_INTERFACE, f"{' and '.join(netdevs)} all have {address}: remove it from all but one of them"
            )
        found.append(netdevs[0])
    return found


def choose_devices(plan: Plan, devices: Sequence[Device], rails: Sequence[str]) -> list[Device]:
    """The devices for NCCL in the order of the rails, which pairs them across ranks. Raises ResolveError."""
    selector = parse_selector(plan.hca)
    on_rails = [d for netdev in rails for d in devices if d.netdev == netdev]
    wanted = [d for d in devices if selector.fits(d.name, d.port)] if plan.hca else on_rails
    chosen = sorted(wanted, key=lambda d: (rails.index(d.netdev) if d.netdev in rails else len(rails), d.name))
    names = ", ".join(f"{d.name}:{d.port} {'active' if d.active else 'down'}" for d in devices) or "none"
    if not devices:
        raise ResolveError(
            NO_DEVICE,
            "this node has no RDMA device: without a cable the ConnectX-7 leaves the PCI bus; "
            "plug it in, then look with: rdma link",
        )
    if not chosen:
        what = f"the selector {plan.hca!r} fits" if plan.hca else f"the interfaces {' and '.join(rails)} have"
        raise ResolveError(NO_DEVICE, f"{what} none of the RDMA devices ({names})")
    # NCCL passes over ports that are down, also where a selector names them.
    active = [d for d in chosen if d.active]
    missing = [netdev for netdev in rails if netdev not in {d.netdev for d in active}]
    if not active or (missing and not plan.hca):
        raise ResolveError(
            NO_DEVICE, f"no active RDMA port on {' and '.join(missing or rails)} ({names}): look with: rdma link"
        )
    bare = [d.name for d in active if not d.gids]
    if bare:
        raise ResolveError(
            NO_GID,
            f"{' and '.join(bare)} has no RoCE v2 GID of an IPv4 address that its interface has: "
            "run playbooks/fabric.yml, which addresses both rails",
        )
    return active


def common_index(devices: Sequence[Device], subnet: str) -> int:
    """The smallest GID index that every device can use within the fabric's subnet. Raises ResolveError."""
    network = ipaddress.ip_network(subnet)
    usable = [{i for i, address in d.gids.items() if ipaddress.ip_address(address) in network} for d in devices]
    shared = set.intersection(*usable) if usable else set()
    if not shared:
        lists = ", ".join(f"{d.name} {sorted(indexes)}" for d, indexes in zip(devices, usable, strict=True))
        raise ResolveError(
            NO_COMMON_GID,
            f"no GID index is valid on every device ({lists}), and the library that serves takes one for all: "
            "install 2.21 or newer (playbooks/gpu.yml), or restart both nodes",
        )
    return min(shared)


def version(text: str) -> tuple[int, ...]:
    """The numbers of a version: "2.28.9" -> (2, 28, 9)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def resolve(plan: Plan, addresses: Mapping[str, Sequence[str]], devices: Sequence[Device]) -> dict[str, str]:
    """The environment of the rank. Raises ResolveError."""
    meeting, *rails = find_interfaces([plan.host, *plan.addresses], addresses)
    found = {
        **plan.environment,
        "VLLM_HOST_IP": plan.host,
        "GLOO_SOCKET_IFNAME": meeting,
        "NCCL_SOCKET_IFNAME": f"={meeting}",
    }
    chosen = choose_devices(plan, devices, rails)
    found["NCCL_IB_HCA"] = "=" + ",".join(f"{d.name}:{d.port}" for d in chosen)
    network = ipaddress.ip_network(plan.subnet)
    if plan.nccl and version(plan.nccl) < SELF_CHOOSING:
        found["NCCL_IB_GID_INDEX"] = str(common_index(chosen, plan.subnet))
    elif any(ipaddress.ip_address(address) not in network for d in chosen for address in d.gids.values()):
        # The interface has other addresses too: NCCL must not choose the GID of one of those.
        found["NCCL_IB_ADDR_RANGE"] = plan.subnet
    return found


def explain(environment: Mapping[str, str], devices: Sequence[Device]) -> str:
    """One line for the journal: what was chosen, and which GID indexes each device offers."""
    chosen = " ".join(f"{name}={value}" for name, value in environment.items())
    offered = "; ".join(f"{d.name}:{d.port} {'active' if d.active else 'down'} {dict(d.gids)}" for d in devices)
    return f"resolved {chosen}; RDMA ports: {offered or 'none'}"


def render(environment: Mapping[str, str]) -> str:
    """An environment file for systemd. An empty variable would hide NCCL's own configuration file: left out."""
    lines = []
    for name, value in environment.items():
        if value:
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


def read_plan(text: str) -> Plan:
    """CONFIG as a plan. Raises ResolveError for text that is not one."""
    try:
        data: dict[str, Any] = json.loads(text)
        ipaddress.ip_network(data["subnet"])
        addresses = tuple(str(ipaddress.ip_address(address)) for address in data.pop("addresses"))
        if not addresses:
            raise ValueError("addresses is empty")
        return Plan(addresses=addresses, **data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResolveError(USAGE, f"the plan cannot be read ({error}): run playbooks/serve.yml") from error


def live_addresses() -> dict[str, list[str]]:
    """What `ip` says now."""
    done = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True)
    return parse_addresses(done.stdout)


def wait_and_resolve(
    plan: Plan, read: Callable[[], Mapping[str, Sequence[str]]], pause: float = 1.0
) -> tuple[dict[str, str], list[Device]]:
    """Resolve, again and again while it fails and time is left: after a boot, addresses and GIDs come late."""
    deadline = time.monotonic() + plan.wait_seconds
    told = ""
    while True:
        addresses = read()
        devices = read_devices(Path(plan.sysfs_root), addresses)
        try:
            return resolve(plan, addresses, devices), devices
        except ResolveError as error:
            if error.status == BAD_SELECTOR or time.monotonic() > deadline:
                raise
            if str(error) != told:
                told = str(error)
                print(f"sparkpair: waiting for the fabric, up to {plan.wait_seconds:.0f} s: {told}", flush=True)
        time.sleep(pause)


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(name).replace(path)


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    if len(arguments) < 2:
        print("usage: resolve.py CONFIG OUTPUT [COMMAND...]", file=sys.stderr)
        return USAGE
    config, output, command = Path(arguments[0]), Path(arguments[1]), list(arguments[2:])
    try:
        environment, devices = wait_and_resolve(read_plan(config.read_text(encoding="utf-8")), live_addresses)
        write(output, render(environment))
        print(f"sparkpair: {explain(environment, devices)}", flush=True)
        if command:
            os.execvpe(command[0], command, {**os.environ, **{k: v for k, v in environment.items() if v}})
    except (ResolveError, OSError, subprocess.CalledProcessError) as error:
        status = error.status if isinstance(error, ResolveError) else USAGE
        # The agent finds the cause of a rank's end in the form in which Python names exceptions.
        print(f"ResolveError: {os.uname().nodename}: {error} (exit status {status})", file=sys.stderr)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
