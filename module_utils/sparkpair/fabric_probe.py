"""Ask over a bare interface who is at its other end: ARP probes for the peers' addresses (RFC 5227, section 2.1.1).

A Linux node answers on any interface for any of its addresses, also where the interface has none, so one node
can ask alone and nothing has to listen on the other. Where our settings are in force (`arp_ignore` 1) it answers
for the address of that rail only: both are asked for.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping

ARP = 0x0806
SECONDS = 1.0
"""How long answers are awaited; an answer over one cable takes less than a millisecond."""

_HEADER = struct.Struct("!6s6sHHHBBH6s4s6s4s")


def request(mac: str, target: str) -> bytes:
    """The probe: a broadcast ARP request without an address of our own."""
    own = bytes.fromhex(mac.replace(":", ""))
    wanted = ipaddress.IPv4Address(target).packed
    return _HEADER.pack(b"\xff" * 6, own, ARP, 1, 0x0800, 6, 4, 1, own, bytes(4), bytes(6), wanted)


def reply(frame: bytes) -> tuple[str, str] | None:
    """Address and MAC of the sender of an ARP reply; None for any other frame."""
    if len(frame) < _HEADER.size:
        return None
    _, _, kind, _, _, _, _, operation, mac, address, _, _ = _HEADER.unpack_from(frame)
    return (str(ipaddress.IPv4Address(address)), mac.hex(":")) if (kind, operation) == (ARP, 2) else None


def resolve(peers: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """IPv4 addresses of peers: address -> peer. Names that this node cannot resolve are passed over."""
    found = {}
    for peer, names in peers.items():
        for name in names:
            try:
                found[socket.gethostbyname(name)] = peer
            except OSError:
                continue
    return found


def probe(macs: Mapping[str, str], targets: Mapping[str, str], seconds: float = SECONDS) -> dict[str, set[str]]:
    """Which peers answer on each interface: netdev -> peers.

    `macs` maps an interface to its MAC, `targets` an address to the peer that has it. Needs root.
    """
    seen: dict[str, set[str]] = {netdev: set() for netdev in macs}
    sockets = {}
    try:
        for netdev, mac in macs.items():
            link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ARP))
            sockets[link] = netdev
            link.bind((netdev, 0))
            for target in targets:
                link.send(request(mac, target))
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for link in select.select(list(sockets), [], [], left)[0]:
                answer = reply(link.recv(2048))
                if answer and answer[0] in targets and answer[1] not in macs.values():
                    seen[sockets[link]].add(targets[answer[0]])
    finally:
        for link in sockets:
            link.close()
    return seen
