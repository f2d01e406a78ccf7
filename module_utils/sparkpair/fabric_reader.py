"""Read the fabric of the node that this runs on: sysfs, `ip`, and, where two cables are in, who answers on which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.fabric import Port, peer_addresses, read_fabric
from ansible.module_utils.sparkpair.fabric_guard import Run, must
from ansible.module_utils.sparkpair.fabric_managers import managers
from ansible.module_utils.sparkpair.fabric_probe import probe, resolve


def ip_json(run: Run, *command: str) -> list[dict[str, Any]]:
    """Output of `ip -j`. Raises GuardError when it fails."""
    return list(json.loads(must(run, "ip", "-j", *command) or "[]"))


def read_renderer(run: Run) -> str:
    """Who carries out netplan's plans that name nobody; empty when netplan does not tell, which means networkd."""
    status, out, _ = run(["netplan", "get", "network.renderer"])
    return "" if status or out.strip() == "null" else out.strip()


def read_node(params: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """What `fabric_info` returns for its arguments. Raises ValueError (FabricError, PlanError or GuardError)."""

    def ask(ports: Sequence[Port]) -> dict[str, set[str]]:
        peers = peer_addresses(params["subnet"], params["rank"], params["names"], params["hosts"])
        seen: dict[str, set[str]] = probe({port.netdev: port.mac for port in ports if port.mac}, resolve(peers))
        return seen

    links = ip_json(run, "addr")
    routes = ip_json(run, "route") + ip_json(run, "-6", "route", "show", "default")
    plan = {key: params[key] for key in ("subnet", "rank", "names", "hosts", "cage", "ring")}
    fabric = read_fabric(Path(params["sysfs_root"]), links, routes, probe=ask, **plan)
    rails = {rail.netdev: rail.mac for rail in fabric.rails}
    return {**fabric.as_dict(), "managers": managers(Path("/"), rails, run), "renderer": read_renderer(run)}
