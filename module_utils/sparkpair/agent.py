"""The rank agent of a node, asked on its local socket; and where its processes listen."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = Path("/run/sparkpair-rank/agent.sock")
LISTENING = "0A"
"""State of a listening TCP socket in /proc/net/tcp (the kernel's include/net/tcp_states.h)."""


def read_agent(path: Path = SOCKET) -> dict[str, Any]:
    """The live state of the agent; `phase` is "absent" when none answers."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(path))
            client.sendall(b"GET /state HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))
    except (OSError, ValueError) as error:
        return {"phase": "absent", "serving": False, "text": f"no agent answers on {path}: {error}"}


ABSENT_S = 30.0
"""Longest time without an agent: systemd starts it again within a second, and gives up after ten times."""


def wait_until_serving(path: Path, timeout: float, pause: float = 0.5) -> tuple[dict[str, Any], str]:
    """The state once the pair serves, and what is wrong (empty when it serves)."""
    until, seen = time.monotonic() + timeout, time.monotonic()
    while True:
        state = read_agent(path)
        if state["phase"] != "absent":
            seen = time.monotonic()
        if state["serving"]:
            return state, ""
        if state["phase"] == "failed" or state["text"].startswith("failed:"):
            return state, f"found the pair {state['text']}, expected it to serve"
        if time.monotonic() >= min(until, seen + ABSENT_S):
            return (
                state,
                f"found after {time.monotonic() - until + timeout:.0f} s: {state['text']}; expected the pair to serve",
            )
        time.sleep(pause)


def parse_address(text: str) -> tuple[str, int]:
    """An address and port of /proc/net/tcp or tcp6, whose words are in the byte order of the machine."""
    words, _, port = text.partition(":")
    raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(words), 8))
    return str(ipaddress.ip_address(raw)), int(port, 16)


def listeners(pids: Iterable[int], proc: Path = Path("/proc")) -> list[str]:
    """Where processes listen, as sorted "address:port". Needs root for processes of other users."""
    inodes: set[str] = set()
    pids = list(pids)
    for pid in pids:
        with suppress(OSError):
            for link in (proc / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())):
                        inodes.add(match[1])
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and words[9] in inodes:
                    found.add(parse_address(words[1]))
    return [f"{address}:{port}" for address, port in sorted(found)]


def closed_ports(ruleset: str) -> list[int]:
    """TCP ports that our table drops off the fabric, from `nft -j list table inet sparkpair`."""
    ports: set[int] = set()
    with suppress(ValueError, TypeError, KeyError):
        for entry in json.loads(ruleset)["nftables"]:
            expressions = entry.get("rule", {}).get("expr", [])
            if not any("drop" in expression for expression in expressions):
                continue
            for expression in expressions:
                match = expression.get("match", {})
                if match.get("left", {}).get("payload", {}).get("field") == "dport":
                    right = match["right"]
                    for part in right["set"] if isinstance(right, Mapping) and "set" in right else [right]:
                        if isinstance(part, Mapping):
                            ports.update(range(part["range"][0], part["range"][1] + 1))
                        else:
                            ports.add(int(part))
    return sorted(ports)


def open_listeners(found: Sequence[str], fabric: Sequence[str], api: str, closed: Sequence[int]) -> list[str]:
    """Listeners of ours that a network could reach: not loopback, not a fabric address, not the API, not firewalled."""
    bad = []
    for entry in found:
        address, _, port = entry.rpartition(":")
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback or str(ip) in fabric or entry == api or int(port) in closed:
            continue
        bad.append(entry)
    return bad
