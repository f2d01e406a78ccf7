"""Output of `ib_write_bw`: read strictly, then judged.

Figures are Gb/s over one cage of two Sparks, from public reports: 105 to 112 for one rail alone, 190 to 196 for both
at once; about 13 after a cold start with the cable plugged in later, 24 after a live reconfiguration, both with every
static value healthy; about half with PCIe x2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.sparkpair.fabric import attribute, entries

ALONE = 90.0
"""Gb/s that one rail alone must reach."""
TOGETHER = 184.0
"""Gb/s that both rails at once must reach: the floor of NVIDIA's own cluster assistant."""

PORT = 18515
"""First TCP port of the measurements; perftest's own default."""

_HEADER = re.compile(r"^\s*#bytes\s+#iterations\s+BW peak\[([^\]]+)\]\s+BW average\[([^\]]+)\]")
_ROW = re.compile(r"^\s*([0-9]+)\s+([0-9]+)\s+([0-9.]+)\s+([0-9]+(?:\.[0-9]+)?)\s+[0-9.]+\s*$")
_MTU = re.compile(r"^\s*Mtu\s*:\s*([0-9]+)\[B\]", re.MULTILINE)
_DEVICE = re.compile(r"Device\s*:\s*(\S+)")


class PerftestError(ValueError):
    """Output that proves nothing; the text says what is missing."""


@dataclass(frozen=True)
class Bandwidth:
    """One measurement: `device`, `gbits` (average, Gb/s), `mtu` of RDMA in bytes (4096 with MTU 9000) or 0."""

    device: str
    gbits: float
    mtu: int


def parse(text: str) -> Bandwidth:
    """Output of one `ib_write_bw --report_gbits`. Raises PerftestError, also for the header without a row (rc 0)."""
    headers = [match for match in map(_HEADER.match, text.splitlines()) if match]
    if not headers:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing")
        raise PerftestError(f"no table; the last line is: {last[:200]}")
    if headers[0].group(2) != "Gb/sec":
        raise PerftestError(f"a table in {headers[0].group(2)} instead of Gb/sec")
    rows = [match for match in map(_ROW.match, text.splitlines()) if match]
    if len(headers) != 1 or len(rows) != 1:
        raise PerftestError(f"a table with {len(rows)} rows instead of one, which a wrong GID index does with status 0")
    device, mtu = _DEVICE.search(text), _MTU.search(text)
    return Bandwidth(device.group(1) if device else "", float(rows[0].group(4)), int(mtu.group(1)) if mtu else 0)


def judge(alone: Sequence[float], together: Sequence[float]) -> tuple[str, str]:
    """Name of the verdict ("pass" or what is wrong) and what mends it. Rails in order, Gb/s."""
    worst, total = min(alone, default=0.0), sum(together)
    if worst >= ALONE and total >= TOGETHER:
        return "pass", ""
    if 8.0 <= worst <= 25.0:
        return "cold-boot-with-cable", (
            "shut both nodes down, unplug their power for a minute with the cable plugged in, start both; a reboot of "
            "both is often enough (link, PCIe width and counters look healthy in this state)"
        )
    if worst < 8.0:
        return "no-rdma", "ibv_devinfo on both nodes; ansible-playbook playbooks/fabric.yml"
    if worst < 60.0:
        return (
            "half-width",
            "cat current_link_width of both functions; sudo fwupdmgr upgrade on both nodes, then reboot",
        )
    if worst >= ALONE:
        return "shared-path", (
            "each rail is fast alone and both are not together: the cable or the switch carries 100G; use a 200G cable"
        )
    return (
        "slow",
        "ansible-playbook playbooks/fabric.yml (fabric_mtu 9000); reboot both nodes with the cable plugged in",
    )


def gid_index(sysfs: Path, hca: str, address: str) -> int | None:
    """Index of the RoCE v2 GID of an IPv4 address on port 1 of an adapter; None when it has none."""
    tail = "".join(f"{int(part):02x}" for part in address.split("."))
    gid = f"0000:0000:0000:0000:0000:ffff:{tail[:4]}:{tail[4:]}"
    port = sysfs / "class/infiniband" / hca / "ports/1"
    for entry in entries(port / "gids"):
        if attribute(entry) == gid and attribute(port / "gid_attrs/types" / entry.name) == "RoCE v2":
            return int(entry.name) if entry.name.isdigit() else None
    return None


def command(rail: Mapping[str, object], gid: int, port: int, seconds: int, target: str = "") -> list[str]:
    """`ib_write_bw` over one rail; the server without a `target`."""
    options = ["-d", str(rail["hca"]), "-i", "1", "-x", str(gid), "-p", str(port), "-D", str(seconds)]
    return ["ib_write_bw", *options, "-F", "--report_gbits", *filter(None, [target])]
