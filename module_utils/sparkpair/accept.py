"""The acceptance gate: layers from the cable to the memory, judged in order; the first that fails stops the gate.

Every layer has an exit code of its own, so that `python3 accept.py REPORT` tells a script which one failed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYERS: Mapping[str, int] = {
    "link_width": 11,
    "link_speed": 12,
    "mtu": 13,
    "bandwidth": 14,
    "parity": 15,
    "known_bad": 16,
    "busbw": 17,
    "memory": 18,
}
"""Layer -> exit code, in the order in which they are judged."""

FULL_WIDTH, FULL_SPEED = 4, 200_000
"""PCIe lanes and Mb/s of a healthy function (public hardware reports)."""

GIB = 1 << 30
Evidence = Sequence[Mapping[str, Any]]
"""Registered results of one module, one for each node in rank order."""


@dataclass(frozen=True)
class Layer:
    """One judged layer: `status` pass, fail or skip; what was found on which node, what was expected, what mends it."""

    layer: str
    status: str
    found: str
    expected: str
    remedy: str
    data: Any = None

    @property
    def code(self) -> int:
        """Exit code: 0 unless the layer failed."""
        return LAYERS[self.layer] if self.status == "fail" else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {**asdict(self), "exit_code": self.code}


def unread(layer: str, names: Sequence[str], evidence: Evidence) -> Layer | None:
    """The layer failed because a node gave no evidence; None when all did."""
    for name, part in zip(names, evidence, strict=True):
        if not part or part.get("failed") or part.get("unreachable"):
            message = " ".join(str((part or {}).get("msg", "nothing was read")).split())
            return Layer(layer, "fail", f"{name}: {message}", "an answer", f"read the message; then ssh {name}")
    return None


def _ports(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The twins of the cage in use, as fabric_info returns them, also from its failed result."""
    return list((part.get("cages") or {}).get(part.get("cage"), []))


def _links(layer: str, names: Sequence[str], evidence: Evidence, key: str, full: int, unit: str, remedy: str) -> Layer:
    if not any(_ports(part) for part in evidence) and (missing := unread(layer, names, evidence)):
        return missing
    shown, bad = [], []
    for name, part in zip(names, evidence, strict=True):
        for port in _ports(part):
            value = port.get(key)
            shown.append(f"{name} {port['netdev']} {'unknown' if value is None else value}")
            if value is not None and int(value) < full:
                bad.append(shown[-1])
    expected = f"{full} {unit} on both twins of the cage"
    if not shown:
        return Layer(layer, "fail", "no cage in use", expected, "ansible-playbook playbooks/fabric.yml")
    return Layer(layer, "fail" if bad else "pass", ", ".join(bad or shown), expected, remedy if bad else "")


def link_width(names: Sequence[str], evidence: Evidence, _: Mapping[str, Any]) -> Layer:
    """PCIe lanes of both twins; old firmware brings one up with two."""
    remedy = "on that node: sudo fwupdmgr refresh, sudo fwupdmgr upgrade, then reboot"
    return _links("link_width", names, evidence, "link_width", FULL_WIDTH, "PCIe lanes", remedy)


def link_speed(names: Sequence[str], evidence: Evidence, _: Mapping[str, Any]) -> Layer:
    """Link speed of both twins; a switch may have negotiated less."""
    remedy = "use a 200G cable; on a switch force 200G-baseCR4 with autonegotiation off"
    return _links("link_speed", names, evidence, "speed", FULL_SPEED, "Mb/s", remedy)


def mtu(names: Sequence[str], evidence: Evidence, _: Mapping[str, Any]) -> Layer:
    """Full-size packets over every rail, both ways; `evidence` of fabric_ping."""
    expected = "packets of the full MTU, unsplit, over both rails and both ways"
    for part in evidence:
        if part and part.get("failed"):
            remedy = "ansible-playbook playbooks/fabric.yml; switch ports need an MTU of 9216"
            return Layer("mtu", "fail", " ".join(str(part.get("msg", "")).split()), expected, remedy)
    if missing := unread("mtu", names, evidence):
        return missing
    paths = [path for part in evidence for path in part["paths"]]
    found = f"{len(paths)} paths with {max((int(path['payload']) for path in paths), default=0) + 28} bytes"
    return Layer("mtu", "pass", found, expected, "", paths)


def bandwidth(names: Sequence[str], evidence: Evidence, _: Mapping[str, Any]) -> Layer:
    """Each rail and all at once, as the fabric stage measures and judges them; `evidence` of fabric_bandwidth."""
    expected = "every rail alone and all at once healthy, over RDMA where there is any"
    for part in evidence:
        if part and part.get("failed"):
            remedy = "ansible-playbook playbooks/fabric.yml; ibv_devinfo on both nodes"
            return Layer("bandwidth", "fail", " ".join(str(part.get("msg", "")).split()), expected, remedy)
    rows = [row for part in evidence for row in (part or {}).get("rows") or []]
    if not rows:
        return Layer("bandwidth", "skip", "not measured", expected, "")
    for row in rows:
        if not row["ok"]:
            return Layer("bandwidth", "fail", " ".join(row["line"].split()), expected, row["mend"], rows)
    return Layer("bandwidth", "pass", "; ".join(" ".join(row["line"].split()) for row in rows), expected, "", rows)


def parity(names: Sequence[str], evidence: Evidence, settings: Mapping[str, Any]) -> Layer:
    """What nodes must share; `evidence` of node_info."""
    from ansible.module_utils.sparkpair.node_check import nccl_faults
    from ansible.module_utils.sparkpair.parity import differences, sentences, table, torn

    if missing := unread("parity", names, evidence):
        return missing
    nodes = {name: part["node"] for name, part in zip(names, evidence, strict=True)}
    found = differences(nodes, "accept", settings.get("accepted") or ())
    faults = [fault for name, node in nodes.items() for fault in torn(name, node["driver"])]
    faults += sentences(found) + nccl_faults(nodes, str(settings.get("nccl") or ""))
    expected = "the same system, driver, CUDA and NCCL on all nodes"
    if faults:
        return Layer("parity", "fail", faults[0], expected, faults[0].rsplit(": ", 1)[-1], table(found).splitlines())
    text = f"{len(found)} rows differ, none of them fatal" if found else "no differences"
    return Layer("parity", "pass", text, expected, "", table(found).splitlines())


def known_bad(names: Sequence[str], evidence: Evidence, _: Mapping[str, Any]) -> Layer:
    """Entries of known_bad.yml that a node meets; `evidence` of node_info."""
    if missing := unread("known_bad", names, evidence):
        return missing
    hits = [{"node": name, **hit} for name, part in zip(names, evidence, strict=True) for hit in part["known_bad"]]
    expected = "nothing that known_bad.yml calls fatal"
    for hit in hits:
        if "accept" in hit["blocks"]:
            found = f"{hit['node']}: {hit['summary']} ({hit['evidence']}) [{hit['id']}]"
            return Layer("known_bad", "fail", found, expected, hit["remedy"], hits)
    return Layer("known_bad", "pass", f"{len(hits)} warnings" if hits else "nothing", expected, "", hits)


def busbw(names: Sequence[str], evidence: Evidence, settings: Mapping[str, Any]) -> Layer:
    """NCCL over all nodes; `evidence` of nccl_bench, arms on rank 0."""
    expected = "one world of all ranks over NET/IB with at least 21.9 GB/s of bus bandwidth"
    if settings.get("serving"):
        text = f"the pair serves on {', '.join(settings['serving'])}, and a test needs its memory"
        return Layer("busbw", "fail", text, expected, "ansible-playbook playbooks/stop.yml, then run again")
    for name, part in zip(names, evidence, strict=True):
        if part and part.get("failed"):
            remedy = "ansible-playbook playbooks/fabric.yml; then run again with -vvv"
            return Layer("busbw", "fail", f"{name}: {' '.join(str(part.get('msg', '')).split())}", expected, remedy)
    arms = (evidence[0] if evidence else {}).get("arms") or {}
    if not arms:
        return Layer("busbw", "skip", "not measured", expected, "")
    first = next(iter(arms.values()))["verdict"]
    found = "; ".join(f"{name}: {arm['verdict']['found']} ({arm['verdict']['name']})" for name, arm in arms.items())
    return Layer("busbw", "pass" if first["passed"] else "fail", found, expected, first["remedy"], arms)


def memory(names: Sequence[str], evidence: Evidence, settings: Mapping[str, Any]) -> Layer:
    """Free memory and leftovers where nothing serves; `evidence` of node_info, `share` of the memory must be there."""
    if missing := unread("memory", names, evidence):
        return missing
    share = float(settings.get("share") or 0.85)
    expected = f"{share:.2f} of the memory available where nothing serves, and nothing left of an engine"
    shown = []
    for name, part in zip(names, evidence, strict=True):
        node = part["node"]
        info, left = node["meminfo"], node["leftovers"]
        total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
        shown.append(f"{name} {available / GIB:.1f} of {total / GIB:.1f} GiB")
        if left["processes"]:
            pids = " ".join(text.split()[0] for text in left["processes"])
            text = f"{name}: {', '.join(left['processes'])}"
            return Layer("memory", "fail", text, expected, f"on that node: sudo kill {pids}")
        if not node["rank_unit"].get("active") and available < share * total:
            remedy = (
                "on that node: echo 3 | sudo tee /proc/sys/vm/drop_caches; ls -l /dev/shm; ps aux --sort -rss | head; "
                "a desktop session takes memory too"
            )
            return Layer("memory", "fail", shown[-1], expected, remedy, left)
    return Layer("memory", "pass", ", ".join(shown), expected, "")


JUDGES: Mapping[str, Callable[[Sequence[str], Evidence, Mapping[str, Any]], Layer]] = {
    "link_width": link_width,
    "link_speed": link_speed,
    "mtu": mtu,
    "bandwidth": bandwidth,
    "parity": parity,
    "known_bad": known_bad,
    "busbw": busbw,
    "memory": memory,
}


def inputs_digest(node: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Digest over what the costly layers measure on one node: when it is the one kept there, nothing need run again."""
    nics = [{key: nic.get(key) for key in ("hca", "firmware", "width", "speed", "rail_mtu")} for nic in node["nics"]]
    # What vLLM's environment brings is measured by nothing here.
    nccl = {key: node["nccl"].get(key) for key in ("package", "path", "sha256")}
    parts = [node["kernel"], node["driver"], nccl, node["dmi"], nics, settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def new_report(nodes: Sequence[str], started: str) -> dict[str, Any]:
    """An empty report; it passes only when a layer was judged and none failed."""
    return {"started": started, "nodes": list(nodes), "verdict": "unfinished", "exit_code": 1, "layers": []}


def add(report: Mapping[str, Any], layer: Layer) -> dict[str, Any]:
    """The report with one more layer; a layer that was there is replaced."""
    layers = [old for old in report["layers"] if old["layer"] != layer.layer] + [layer.as_dict()]
    failed = next((one for one in layers if one["status"] == "fail"), None)
    verdict = f"failed at {failed['layer']}" if failed else "passed"
    return {**report, "layers": layers, "verdict": verdict, "exit_code": failed["exit_code"] if failed else 0}


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people."""

    def cell(text: Any) -> str:
        return str(text).replace("|", "\\|").replace("\n", " ")

    lines = [
        f"# Acceptance of {' and '.join(report['nodes'])}: {report['verdict']}",
        "",
        f"Started {report['started']}, exit code {report['exit_code']}.",
        "",
        "| layer | status | found | expected |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one['layer']} | {one['status']} | {cell(one['found'])} | {cell(one['expected'])} |"
        for one in report["layers"]
    ]
    for one in report["layers"]:
        if one["status"] == "fail":
            lines += ["", f"**What mends it:** {one['remedy']}"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print a report and exit with the code of the layer that failed; 0 passed, 1 unfinished, 2 no such report."""
    if len(arguments) != 1:
        print("usage: accept.py REPORT.json", file=sys.stderr)
        return 2
    try:
        report = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        print(markdown(report), end="")
        return int(report["exit_code"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"accept: {arguments[0]} is no report ({error})", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
