"""The pair as one table: what each node has, what runs, where they differ, and what is not proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.module_utils.sparkpair.agent import open_listeners
from ansible.module_utils.sparkpair.rank import expected_differences

Node = Mapping[str, Any]
DRIFT = "≠"
WIDTH = 64
"""Longest cell of the table in characters; what is longer stands in full among the faults."""
RESTART = "ansible-playbook site.yml, or journalctl -u sparkpair-rank on the node"


def read_error(part: Mapping[str, Any] | None) -> str:
    """Why a registered result holds no data, in one line; empty when it does."""
    if not part:
        return "not read"
    if part.get("skipped"):
        return "not asked: the rank does not run"
    if part.get("unreachable"):
        return "unreachable"
    if part.get("failed"):
        return (str(part.get("msg", "")).splitlines() or ["failed"])[0]
    return ""


def _or_error(key: str, show: Callable[[Mapping[str, Any]], str]) -> Callable[[Node], str]:
    def cell(node: Node) -> str:
        return read_error(node.get(key)) or show(node[key])

    return cell


def _fabric(part: Mapping[str, Any]) -> str:
    rails = [f"{', '.join(rail['addresses']) or rail['netdev'] + ' no address'}" for rail in part["rails"]]
    mtus = sorted({str(rail["mtu"]) for rail in part["rails"]})
    return f"{part['cage']}: {', '.join(rails)}, MTU {'/'.join(mtus)}"


def _unit(part: Mapping[str, Any]) -> str:
    unit = part["unit"]
    if unit.get("LoadState") == "not-found":
        return "not installed"
    return f"{unit['ActiveState']} ({unit['SubState']}), {unit['UnitFileState']}, {unit['NRestarts']} restarts"


def _cap(part: Mapping[str, Any]) -> str:
    readable = [process["env"] for process in part["processes"] if process["env"] is not None]
    if not readable:
        return "nothing runs"
    caps = sorted({env.get("DSPARK_MAX_INFLIGHT_PREFILLS", "unset") for env in readable})
    shown = f"{', '.join(caps)} in the service's environment"
    scheduler = part.get("scheduler")
    return f"{scheduler['cap']} ({scheduler['policy']}) in the scheduler, {shown}" if scheduler else shown


def _completion(part: Mapping[str, Any]) -> str:
    done = part["completion"]
    return f"{done['chunks']} chunks streamed, first after {done['first_token_s']:.2f} s"


# Label, cell, and whether all nodes must show the same.
ROWS: Sequence[tuple[str, Callable[[Node], str], bool]] = (
    ("system", _or_error("rank_info", lambda part: str(part["system"])), True),
    ("fabric", _or_error("fabric", _fabric), False),
    ("gpu", _or_error("rank_info", lambda part: ", ".join(map(" ".join, part["packages"].items())) or "none"), True),
    (
        "vllm_env",
        _or_error("rank_info", lambda part: f"{part['vllm']} {part['digests']['env']}".strip() or "none"),
        True,
    ),
    ("hotfix", _or_error("hotfix", lambda part: f"{part['status']} {part['digest'][:12]}".strip()), True),
    ("model", _or_error("rank_info", lambda part: str(part["digests"]["model"] or "none")), True),
    ("serve", _or_error("rank_info", _unit), False),
    ("agent", _or_error("rank_info", lambda part: str(part["agent"]["text"])), False),
    ("cap in force", _or_error("rank_info", _cap), False),
)


def _listeners(name: str, node: Node, api: str) -> list[str]:
    part, fabric = node["rank_info"], node.get("fabric") or {}
    own = [address for rail in fabric.get("rails", []) for address in rail["addresses_by_rank"]]
    return [
        f"{name}: found a process of the rank listening on {entry}, expected loopback, the fabric or the API alone: "
        f"playbooks/serve.yml, or stop what opened it"
        for entry in open_listeners(part["listeners"], own, api, part["closed_ports"])
    ]


def faults_of(nodes: Mapping[str, Node], want: Mapping[str, str], patched: bool, api: str = "") -> list[str]:
    """What keeps the pair from being proven, as sentences with the command that mends it.

    `nodes` in rank order, `want` the variables that every process must have, `patched` whether the hotfix must
    be in force, `api` where the head's API may listen, as address:port.
    """
    faults: list[str] = []
    head = next(iter(nodes))
    for name, node in nodes.items():
        part = node.get("rank_info")
        if error := read_error(part):
            faults.append(f"{name}: found {error}, expected to read the rank: ssh {name}")
            continue
        assert part is not None
        if part["unit"]["ActiveState"] != "active":
            faults.append(f"{name}: found the rank {part['unit']['ActiveState']}, expected active: {RESTART}")
        elif all(process["env"] is None for process in part["processes"]):
            faults.append(f"{name}: found no process of the rank, expected vllm serve: {RESTART}")
        if not part["agent"]["serving"]:
            faults.append(f"{name}: found the agent saying '{part['agent']['text']}', expected it to serve: {RESTART}")
        faults += _listeners(name, node, api if name == head else "")
        faults += [f"{name}: {text}: {RESTART}" for text in expected_differences(want, part["processes"])]
        status = str((node.get("hotfix") or {}).get("status", read_error(node.get("hotfix"))))
        if patched and status not in ("patched", "not-needed"):
            faults.append(f"{name}: found the scheduler {status}, expected patched: playbooks/hotfix.yml")
    faults += _drift(nodes)
    part = nodes[head].get("rank_info") or {}
    if patched and not read_error(part) and part["unit"]["ActiveState"] == "active":
        cap = str((part.get("scheduler") or {}).get("cap", "none"))
        expected = want.get("DSPARK_MAX_INFLIGHT_PREFILLS", "")
        if cap != expected:
            faults.append(f"{head}: found the cap {cap} in the running scheduler's log, expected {expected}: {RESTART}")
    answer = nodes[head].get("completion") or {}
    if not answer.get("skipped") and (error := read_error(answer)):
        faults.append(f"{head}: {error}")
    return faults


def _drift(nodes: Mapping[str, Node]) -> list[str]:
    faults = []
    first, *rest = nodes
    for label, cell, same in ROWS:
        for name in rest if same else []:
            if cell(nodes[name]) != cell(nodes[first]):
                faults.append(
                    f"{name}: found {label} {cell(nodes[name])}, expected {cell(nodes[first])} as on {first}: "
                    f"ansible-playbook site.yml"
                )
    return faults


def table(nodes: Mapping[str, Node], faults: Sequence[str]) -> str:
    """The pair as text: one row for each stage, one column for each node, drift marked, faults below."""
    names = list(nodes)
    header = ["", *(f"{name} ({'head' if rank == 0 else f'rank {rank}'})" for rank, name in enumerate(names))]
    lines = [header]
    for label, cell, same in ROWS:
        cells = [cell(nodes[name]) for name in names]
        drifts = same and len(set(cells)) > 1
        lines.append([f"{label} {DRIFT}" if drifts else label, *cells])
    head = nodes[names[0]]
    lines.append(["answer", read_error(head.get("completion")) or _completion(head["completion"])])
    lines = [[cell if len(cell) <= WIDTH else cell[: WIDTH - 1] + "…" for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(header))]
    text = ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
    verdict = "serving, proven by a streamed completion" if not faults else f"NOT PROVEN, {len(faults)} to mend"
    return "\n".join([f"sparkpair: {verdict}", *text, *(f"  - {fault}" for fault in faults)])
