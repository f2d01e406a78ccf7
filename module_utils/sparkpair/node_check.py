"""Whether nodes can serve together: what each must be, what all must share, and what is known to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.sparkpair.known_bad import split
from ansible.module_utils.sparkpair.node import GIB, check_node, explain_failure
from ansible.module_utils.sparkpair.parity import differences, sentences, table, torn


@dataclass(frozen=True)
class Verdict:
    """`faults` stop the stage, `warnings` are shown, `table` has every difference between the nodes."""

    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    table: str


def nccl_faults(nodes: Mapping[str, Mapping[str, Any]], library: str) -> list[str]:
    """Nodes whose system NCCL is not at `library`, as sentences; none when `library` is empty."""
    return [
        f"{name}: found {node['nccl']['path'] or 'no libnccl.so.2'}, expected {library} (gpu_nccl_path): "
        f"ls -l {library}; dpkg -L libnccl2"
        for name, node in nodes.items()
        if library and node["nccl"]["path"] != library
    ]


def leftover_warnings(name: str, leftovers: Mapping[str, Any]) -> list[str]:
    """What dead engines left on a node, as sentences."""
    found = []
    if leftovers["processes"]:
        found.append(
            f"{name}: found engine processes outside the service ({', '.join(leftovers['processes'])}), expected none: "
            f"sudo kill {' '.join(text.split()[0] for text in leftovers['processes'])}"
        )
    if leftovers["bytes"] > GIB and not leftovers["processes"]:
        found.append(
            f"{name}: found {leftovers['segments']} shared-memory segments with {leftovers['bytes'] / GIB:.1f} GiB, "
            f"expected none beside a stopped service: ls -l /dev/shm"
        )
    return found


def check(
    results: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str],
    stage: str,
    limits: Mapping[str, Any],
    accepted: Sequence[str],
    nccl: str,
    now: float,
) -> Verdict:
    """Judge registered results of `node_info`, one for each node.

    `addresses` are logins with addresses for the sentences, `limits` as `node.check_node` takes them, empty to skip
    those checks; `accepted` labels of the parity table may differ; `nccl` is the library that all must have; `now` is
    the controller's epoch in seconds.
    """
    faults = [
        fault for name, result in results.items() for fault in explain_failure(name, result, addresses.get(name, name))
    ]
    if faults:
        return Verdict(tuple(faults), (), "")
    nodes = {name: result["node"] for name, result in results.items()}
    warnings: list[str] = []
    for name, node in nodes.items():
        faults += check_node(name, node, limits, now) if limits else []
        faults += torn(name, node["driver"])
        bad, odd = split(name, results[name].get("known_bad", []), stage)
        faults += bad
        warnings += [*odd, *leftover_warnings(name, node["leftovers"])]
    found = differences(nodes, stage, accepted)
    faults += sentences(found) + nccl_faults(nodes, nccl)
    shown = table(found)
    if shown and not faults:
        warnings.append(f"the nodes differ:\n{shown}")
    return Verdict(tuple(faults), tuple(warnings), shown)
