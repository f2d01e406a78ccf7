"""The text of every file that the fabric has on a node. Pure: rails and names in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ARP_SETTINGS = {"arp_ignore": "1", "arp_announce": "2"}
"""Twins share one cable: each must answer (1) and ask (2) for its own address only, or ARP mixes the rails."""

TABLE = "sparkpair"
"""Our nftables table, family inet; no other table is touched."""

EPHEMERAL = "32768-60999"
"""Where vLLM, Gloo and NCCL listen when nobody names a port: the kernel's default net.ipv4.ip_local_port_range."""

FIREWALL_UNIT = "sparkpair-fabric.service"

BEGIN, END = "# BEGIN sparkpair fabric", "# END sparkpair fabric"
"""First and last line of our block in /etc/hosts."""

_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$")
_BLOCK = re.compile(rf"^{BEGIN}\n.*?^{END}\n?", re.MULTILINE | re.DOTALL)


def sysctl_text(netdevs: Iterable[str]) -> str:
    """The file that sets `ARP_SETTINGS` for each interface at boot."""
    lines = ["# Managed by sparkpair. The twins of a cage share one cable: each answers for its own address only."]
    lines += [f"net.ipv4.conf.{netdev}.{name} = {value}" for netdev in netdevs for name, value in ARP_SETTINGS.items()]
    return "\n".join(lines) + "\n"


def host_label(name: str, rank: int) -> str:
    """The node's name where it can be part of a host name ("spark-a" of "spark-a.local"), else "rank0"."""
    first = name.split(".")[0]
    return first if _HOST.match(first) and not first.isdigit() else f"rank{rank}"


def hosts_block(rails: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Our block of /etc/hosts: `<node>-rail<n>` for every address of the fabric. Empty without names."""
    lines = [
        f"{address} {host_label(name, rank)}-rail{rail['rail']}"
        for rank, name in enumerate(names)
        for rail in rails
        if (address := rail["addresses_by_rank"][rank])
    ]
    return "\n".join([BEGIN, *lines, END]) + "\n" if lines else ""


def find_block(text: str) -> str:
    """Our block as it stands in `text`; empty when there is none."""
    match = _BLOCK.search(text)
    return match.group(0) if match else ""


def with_block(text: str, block: str) -> str:
    """`text` with our block replaced where it stands, or added at its end."""
    if _BLOCK.search(text):
        return _BLOCK.sub(lambda _: block, text, count=1)
    return f"{text}\n{block}" if text and block and not text.endswith("\n") else text + block


def firewall_text(
    rails: Sequence[Mapping[str, Any]], rank: int, ports: Iterable[int], meeting: Sequence[str] = ()
) -> str:
    """The nftables file of a node: peers over their rail pass, everybody else is kept from the pair's own ports.

    `meeting` are the addresses by rank at which ranks meet where no rail reaches all of them: there peers may ask the
    ports and `EPHEMERAL` ones, and others may open no connection to those.

    vLLM, Gloo and NCCL open random ports on the fabric address, without authentication; the rendezvous store
    listens on all addresses. The kernel answers for any of its addresses on any interface, so that an address
    is on a rail protects nothing by itself.
    """
    accept = [
        f'    iifname "{rail["netdev"]}" ip saddr {{ {", ".join(peers)} }} accept'
        for rail in rails
        if (peers := [a for other, a in enumerate(rail["addresses_by_rank"]) if a and other != rank])
    ]
    others = ", ".join(address for other, address in enumerate(meeting) if other != rank)
    own = ", ".join(rail["addresses_by_rank"][rank] for rail in rails)
    closed = ", ".join(str(port) for port in sorted(set(ports)))
    lines = [
        "# Managed by sparkpair: one table of our own. Loaded at boot by " + FIREWALL_UNIT,
        f"table inet {TABLE}",
        f"delete table inet {TABLE}",
        f"table inet {TABLE} {{",
        "  chain input {",
        "    type filter hook input priority filter - 10; policy accept;",
        '    iifname "lo" accept',
        *accept,
        f"    ip daddr {{ {own} }} drop",
        *([f"    ip saddr {{ {others} }} accept", f"    tcp dport {EPHEMERAL} ct state new drop"] if others else []),
        *([f"    tcp dport {{ {closed} }} drop"] if closed else []),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def unit_text(firewall_file: str) -> str:
    """The unit that loads the table at boot, and again when nftables.service throws all tables away."""
    return f"""\
# Managed by sparkpair.
[Unit]
Description=Firewall of the sparkpair fabric
DefaultDependencies=no
After=local-fs.target nftables.service
PartOf=nftables.service
Before=network-pre.target shutdown.target
Wants=network-pre.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/nft -f {firewall_file}
ExecStop=-/usr/sbin/nft delete table inet {TABLE}

[Install]
WantedBy=sysinit.target
"""


def ufw_allowed(rules: str, netdev: str) -> bool:
    """Whether ufw's `user.rules` already lets everything in on `netdev`."""
    return any(
        line.startswith("### tuple ### allow any any ") and f" in_{netdev}" in line for line in rules.splitlines()
    )


def ufw_enabled(conf: str) -> bool:
    """Whether `/etc/ufw/ufw.conf` says that ufw is active."""
    return bool(re.search(r"^\s*ENABLED\s*=\s*yes\s*$", conf, re.MULTILINE | re.IGNORECASE))
