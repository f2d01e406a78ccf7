"""The pair as one table: what each node has, what runs, where they differ, and what is not proven."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.sparkpair.agent import open_listeners
from ansible.module_utils.sparkpair.rank import expected_differences

Node = Mapping[str, Any]
DRIFT = "≠"
WIDTH = 64
"""Longest cell of the table in characters; what is longer stands in full among the faults."""
JOURNAL = "journalctl -u sparkpair-rank on the node"


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
    if not scheduler:
        return shown
    limits = ", ".join(f"{name} {scheduler[name]}" for name in ("threshold", "budget") if scheduler.get(name))
    return f"{scheduler['cap']} ({scheduler['policy']}, {limits}) in the scheduler, {shown}"


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
    (
        "hotfix",
        _or_error("hotfix", lambda part: f"{part['found']['status']} {part['found']['digest'][:12]}".strip()),
        True,
    ),
    ("model", _or_error("rank_info", lambda part: str(part["digests"]["model"] or "none")), True),
    ("serve", _or_error("rank_info", _unit), False),
    ("agent", _or_error("rank_info", lambda part: str(part["agent"]["text"])), False),
    ("cap in force", _or_error("rank_info", _cap), False),
)


@dataclass(frozen=True)
class Wish:
    """What the pair must be: variables of every process, whether the hotfix is in, and how to run a playbook."""

    variables: Mapping[str, str]
    patched: bool
    play: str = "ansible-playbook"
    api: str = ""
    """Where the head's API may listen, as address:port."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    older: bool = False
    """Whether an earlier hotfix counts too: a rollback brings back the one of that time."""
    """Options of `vllm serve` that were asked for."""


def faults_of(nodes: Mapping[str, Node], wish: Wish) -> list[str]:
    """What keeps the pair from being proven, as sentences with the command that mends it; `nodes` in rank order."""
    site = f"{wish.play} site.yml"
    faults = [f"{name}: {fault}" for name, node in nodes.items() for fault in _node_faults(node, wish, site)]
    first, *rest = nodes
    for name, node in nodes.items():
        api = wish.api if name == first else ""
        faults += [f"{name}: {fault}: {site}" for fault in _listeners(node, api)]
    for label, cell, same in ROWS:
        for name in rest if same else []:
            found, expected = cell(nodes[name]), cell(nodes[first])
            if found != expected and not _unread(nodes[name]) and not _unread(nodes[first]):
                faults.append(f"{name}: found {label} {found}, expected {expected} as on {first}: {site}")
    for name in rest:
        if (nodes[name].get("completion") or {}).get("failed"):
            faults.append(f"{name}: {read_error(nodes[name]['completion'])}")
    answer = nodes[first].get("completion") or {}
    if not answer.get("skipped") and not _unread(nodes[first]) and (error := read_error(answer)):
        faults.append(f"{first}: {error}")
    return faults


def _unread(node: Node) -> str:
    return read_error(node.get("rank_info"))


def _listeners(node: Node, api: str) -> list[str]:
    if _unread(node):
        return []
    part, fabric = node["rank_info"], node.get("fabric") or {}
    own = [address for rail in fabric.get("rails", []) for address in rail["addresses_by_rank"]]
    return [
        f"found a process of the rank listening on {entry}, expected loopback, the fabric or the API alone"
        for entry in open_listeners(part["listeners"], own, api, part["closed_ports"])
    ]


def _node_faults(node: Node, wish: Wish, site: str) -> list[str]:
    if error := _unread(node):
        return [f"found {error}, expected an answer over SSH: switch the node on, or mend ansible_host"]
    part, faults = node["rank_info"], []
    if part["unit"]["ActiveState"] != "active":
        restart = f"{wish.play} playbooks/restart.yml"
        faults.append(f"found the rank {part['unit']['ActiveState']}, expected active: {restart}, or {JOURNAL}")
    elif all(process["env"] is None for process in part["processes"]):
        faults.append(f"found no process of the rank, expected vllm serve: {JOURNAL}")
    if not part["agent"]["serving"]:
        faults.append(f"found the agent saying '{part['agent']['text']}', expected it to serve: {JOURNAL}")
    faults += [f"{text}: {site}" for text in expected_differences(wish.variables, part["processes"])]
    status = read_error(node.get("hotfix")) or node["hotfix"]["found"]["status"]
    fine = ("patched", "not-needed") if wish.patched else ("original", "not-needed", "absent")
    fine = (*fine, "patched-older") if wish.patched and wish.older else fine
    if status not in fine:
        faults.append(f"found the scheduler {status}, expected {fine[0]}: {site}")
    if status == "patched":
        answered = bool((node.get("completion") or {}).get("completion"))
        faults += [f"{text}: {site}" for text in _scheduler_faults(part.get("scheduler"), answered, wish)]
    return faults


def _scheduler_faults(scheduler: Mapping[str, Any] | None, answered: bool, wish: Wish) -> list[str]:
    """How the running scheduler differs from what was asked: vLLM and the hotfix fall back without an error."""
    expected = {
        "cap": wish.variables.get("DSPARK_MAX_INFLIGHT_PREFILLS"),
        "policy": wish.variables.get("DSPARK_PREFILL_POLICY"),
        "threshold": wish.engine.get("long-prefill-token-threshold", 0),
        "budget": wish.engine.get("max-num-batched-tokens"),
    }
    if not scheduler:
        return [f"found a running scheduler that did not log its cap, expected {expected['cap']}"] if answered else []
    return [
        f"found the {name} {scheduler.get(name)} in the running scheduler, expected {value}"
        for name, value in expected.items()
        # vLLM also takes "4k"; only plain numbers and words are compared.
        if value is not None and re.fullmatch(r"\d+|[a-z]+", str(value)) and str(scheduler.get(name)) != str(value)
    ]


def table(nodes: Mapping[str, Node], faults: Sequence[str], checking: bool = False) -> str:
    """The pair as text: one row for each stage, one column for each node, drift marked, faults below.

    `checking`: a run in check mode shows what is there now, and judges nothing.
    """
    names = list(nodes)
    header = ["", *(f"{name} ({'head' if rank == 0 else f'rank {rank}'})" for rank, name in enumerate(names))]
    lines = [header]
    for label, cell, same in ROWS:
        cells = [cell(nodes[name]) for name in names]
        drifts = same and len(set(cells)) > 1
        lines.append([f"{label} {DRIFT}" if drifts else label, *cells])
    head = nodes[names[0]]
    answer = _unread(head) or read_error(head.get("completion")) or _completion(head["completion"])
    lines.append(["answer", answer])
    lines = [[cell if len(cell) <= WIDTH else cell[: WIDTH - 1] + "…" for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(header))]
    text = ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
    if checking:
        return "\n".join(["sparkpair: as it is now, before the changes that this check predicts", *text])
    verdict = "serving, proven by a streamed completion" if not faults else f"NOT PROVEN, {len(faults)} to mend"
    return "\n".join([f"sparkpair: {verdict}", *text, *(f"  - {fault}" for fault in faults)])
