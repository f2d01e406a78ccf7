"""What all nodes must share: one table of every difference, and which of them stop which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALWAYS = ("preflight", "gpu", "accept")
INSTALLED = ("gpu", "accept")
"""Stages after CUDA and NCCL were installed; before, a node that is new may lack them."""

CLOCK_S = 5.0
"""Seconds that clocks of two nodes may differ without a warning; the readings are a second or two apart."""

OTA = "run the same DGX OS update on all nodes (dashboard)"
FIRMWARE = "sudo fwupdmgr refresh, sudo fwupdmgr upgrade on all nodes, then reboot"
SITE = "ansible-playbook site.yml"


@dataclass(frozen=True)
class Row:
    """One thing that nodes share. `path` into the facts, `fatal` the stages that a difference stops."""

    label: str
    path: str
    fatal: tuple[str, ...]
    mend: str


ROWS = (
    Row("os", "os", ALWAYS, "upgrade the older node"),
    Row("release", "release", ALWAYS, OTA),
    Row("arch", "arch", ALWAYS, "use nodes of one kind"),
    Row("kernel", "kernel", (), f"{OTA}, then reboot"),
    Row("python", "python", ALWAYS, "upgrade the older node"),
    Row("login uid", "uid", ALWAYS, "use a login with one numeric id on all nodes"),
    Row("service uid", "users", ("accept",), SITE),
    Row("service gid", "groups", ("accept",), SITE),
    Row("driver", "driver.running", ALWAYS, OTA),
    Row("cuda", "cuda.version", INSTALLED, SITE),
    Row("nccl package", "nccl.package", INSTALLED, SITE),
    Row("libnccl.so.2", "nccl.sha256", INSTALLED, "sudo apt-get install --reinstall libnccl2 on all nodes"),
    Row("nccl of vllm", "nccl.wheel_sha256", ("accept",), "ansible-playbook playbooks/vllm_env.yml"),
    Row("adapter firmware", "nics.firmware", (), FIRMWARE),
    Row("bios", "dmi.bios_version", (), FIRMWARE),
    Row("product", "dmi.product_name", (), "nothing: OEM units differ, their firmware may too"),
)


@dataclass(frozen=True)
class Difference:
    """One row in which nodes differ: what each shows, and whether it stops the stage."""

    label: str
    shown: Mapping[str, str]
    fatal: bool
    mend: str


def cell(node: Mapping[str, Any], path: str) -> str:
    """What one node shows for a path, as text; lists as their distinct values."""
    value: Any = node
    for key in path.split("."):
        if isinstance(value, list | tuple):
            value = sorted({str(item.get(key, "")) for item in value if isinstance(item, Mapping)} - {""})
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value[key]}" for key in sorted(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def differences(nodes: Mapping[str, Mapping[str, Any]], stage: str, accepted: Sequence[str] = ()) -> list[Difference]:
    """Rows in which the nodes differ. `accepted` labels differ without stopping anything."""
    found = []
    for row in ROWS:
        shown = {name: cell(node, row.path) for name, node in nodes.items()}
        if len(set(shown.values())) > 1:
            fatal = stage in row.fatal and row.label not in accepted
            found.append(Difference(row.label, shown, fatal, row.mend))
    clocks = {name: float(node.get("epoch") or 0.0) for name, node in nodes.items()}
    if clocks and max(clocks.values()) - min(clocks.values()) > CLOCK_S:
        shown = {name: f"{epoch - min(clocks.values()):+.1f} s" for name, epoch in clocks.items()}
        found.append(Difference("clock", shown, False, "sudo timedatectl set-ntp true on all nodes"))
    return found


def torn(name: str, driver: Mapping[str, str]) -> list[str]:
    """A sentence when what is known of module, package and running version of a node's driver is not one version."""
    known = {part: driver.get(part, "") for part in ("module", "package", "running") if driver.get(part)}
    if len(set(known.values())) < 2:
        return []
    shown = ", ".join(f"{part} {version}" for part, version in known.items())
    return [
        f"{name}: found a driver of several versions ({shown}), expected one: finish the DGX OS update from the "
        f"dashboard, then sudo systemctl reboot"
    ]


def table(found: Sequence[Difference], width: int = 34) -> str:
    """All differences as one table, with what mends each; empty when there are none."""
    if not found:
        return ""
    names = list(found[0].shown)
    rows = [["", *names, "", "mends"]]
    for item in found:
        cells = [item.shown[name] or "nothing" for name in names]
        cells = [text if len(text) <= width else text[: width - 1] + "…" for text in cells]
        rows.append([item.label, *cells, "fatal" if item.fatal else "differs", item.mend])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(widths[at]) for at, text in enumerate(row)).rstrip() for row in rows)


def sentences(found: Sequence[Difference]) -> list[str]:
    """One sentence for each fatal difference; the first node is the measure."""
    faults = []
    for item in found:
        first, *rest = item.shown
        for name in rest if item.fatal else []:
            if item.shown[name] != item.shown[first]:
                faults.append(
                    f"{name}: found {item.label} {item.shown[name] or 'nothing'}, expected "
                    f"{item.shown[first] or 'nothing'} as on {first}: {item.mend}"
                )
    return faults
