"""How the agent tells what it does: systemd, the journal, JSON and Prometheus text."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

JOURNAL = "/run/systemd/journal/socket"


class Systemd:
    """sd_notify without a library: datagrams to the socket that systemd names. Silent without one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.path = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
        self.last = ""

    def tell(self, *lines: str) -> None:
        if not self.path:
            return
        address = "\0" + self.path[1:] if self.path.startswith("@") else self.path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), address)

    def status(self, text: str) -> None:
        """STATUS= when it changed."""
        if text != self.last:
            self.last = text
            self.tell(f"STATUS={text}")


class Journal:
    """Lines to the journal with their rank and generation; to standard output where there is no journal."""

    def __init__(self, rank: int, path: str = JOURNAL) -> None:
        self.rank = rank
        self.sock: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            self.sock = None

    def write(self, name: str, generation: int, line: str, priority: int = 6) -> None:
        if self.sock is not None:
            text = (
                f"MESSAGE={line}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER={name}\n"
                f"SPARKPAIR_RANK={self.rank}\nSPARKPAIR_GENERATION={generation}\n"
            )
            with suppress(OSError):
                self.sock.send(text.encode())
                return
        print(f"{name}: {line}", file=sys.stdout, flush=True)

    def vllm(self, generation: int, line: str) -> None:
        priority = 3 if " ERROR " in line or line.startswith("ERROR ") else 4 if "WARNING " in line else 6
        self.write("vllm", generation, line, priority)


def prometheus(state: Mapping[str, Any]) -> str:
    """The live state as Prometheus text."""
    label = f'{{rank="{state["rank"]}",node="{state["name"]}"}}'
    rows = [
        ("serving", "gauge", "1 while a completion proved this pair and nothing failed since", int(state["serving"])),
        ("generation", "counter", "Number of the last generation on this node", state["generation"]),
        ("crashes", "gauge", "Generations that ended by themselves within the window", state["crashes"]),
        ("held", "gauge", "1 while a pause or a fatal state bars restarts", int(bool(state["hold"]))),
        ("resident_bytes", "gauge", "Resident memory of the agent", state["resident_bytes"]),
        ("cpu_seconds_total", "counter", "Processor time of the agent", state["cpu_s"]),
    ]
    lines = []
    for name, kind, text, value in rows:
        full = f"sparkpair_rank_{name}"
        lines += [f"# HELP {full} {text}.", f"# TYPE {full} {kind}", f"{full}{label} {value}"]
    lines += [
        "# HELP sparkpair_rank_rail_up 1 while the peer is heard on the rail.",
        "# TYPE sparkpair_rank_rail_up gauge",
    ]
    for peer, rails in state["rails"].items():
        for rail, up in rails.items():
            lines.append(f'sparkpair_rank_rail_up{{rank="{state["rank"]}",peer="{peer}",rail="{rail}"}} {int(up)}')
    return "\n".join(lines) + "\n"


def own_cost() -> dict[str, float]:
    """Resident memory in bytes and processor time in seconds of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    times = os.times()
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "cpu_s": round(times.user + times.system, 2)}
