#!/usr/bin/python
"""Read the fabric of a node. Thin: arguments in, `ansible.module_utils.sparkpair.fabric` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_info
short_description: Find the cabled QSFP cage of a DGX Spark and plan its addresses
description:
  - Reads sysfs and C(ip -j), chooses the cage with the cable and returns its rails with planned addresses.
  - Refuses when no cage, or more than one, can carry the fabric. Changes nothing.
author: sparkpair
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, description: Reads only.}
options:
  node: {description: Name of the node for messages., type: str, default: ''}
  subnet: {description: IPv4 network that is split into one /24 per rail., type: str, required: true}
  rank: {description: Position of this node in the cluster; 0 is the head., type: int, required: true}
  nodes: {description: Number of nodes in the cluster., type: int, required: true}
  cage: {description: Cage to use (p0 or p1); empty finds the one with a cable., type: str, default: ''}
  allow_degraded:
    description: Warn instead of refusing when a rail is slower than its hardware.
    type: bool
    default: false
  sysfs_root: {description: Where sysfs is mounted., type: path, default: /sys}
"""

EXAMPLES = r"""
- name: Read the fabric
  fabric_info:
    subnet: 192.168.176.0/23
    rank: "{{ groups['sparks'].index(inventory_hostname) }}"
    nodes: "{{ groups['sparks'] | length }}"
  register: __fabric_info
"""

RETURN = r"""
cage: {description: The chosen cage., type: str, returned: always, sample: p0}
rails:
  description: One entry per rail with netdev, hca, carrier, mtu, speed, present and planned addresses.
  type: list
  elements: dict
  returned: always
cages: {description: All ports of the adapter by cage., type: dict, returned: always}
default_route_interfaces: {description: Interfaces of default routes., type: list, returned: always}
problems: {description: What makes the rails slow., type: list, returned: always}
managers: {description: Who manages each rail (netplan NetworkManager networkd)., type: dict, returned: success}
foreign_addresses: {description: Addresses on rails that are not of the plan., type: dict, returned: always}
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.fabric import read_fabric
from ansible.module_utils.sparkpair.fabric_managers import managers


def ip_json(module: AnsibleModule, *command: str) -> list[dict[str, Any]]:
    """Output of `ip -j`; the module fails when the command does."""
    _, out, _ = module.run_command(["ip", "-j", *command], check_rc=True)
    return list(json.loads(out or "[]"))


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "subnet": {"type": "str", "required": True},
            "rank": {"type": "int", "required": True},
            "nodes": {"type": "int", "required": True},
            "cage": {"type": "str", "default": ""},
            "allow_degraded": {"type": "bool", "default": False},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    p = module.params
    links = ip_json(module, "addr")
    routes = ip_json(module, "route") + ip_json(module, "-6", "route", "show", "default")
    prefix = f"{p['node']}: " if p["node"] else ""
    plan = {key: p[key] for key in ("subnet", "rank", "nodes", "cage")}
    try:
        fabric = read_fabric(Path(p["sysfs_root"]), links, routes, **plan)
    except ValueError as error:
        module.fail_json(msg=f"{prefix}{error}")
    if fabric.problems and not p["allow_degraded"]:
        module.fail_json(msg=f"{prefix}{'; '.join(fabric.problems)}", **fabric.as_dict())
    for problem in fabric.problems:
        module.warn(f"{prefix}{problem}")
    rails = {rail.netdev: rail.mac for rail in fabric.rails}
    module.exit_json(changed=False, managers=managers(Path("/"), rails, module.run_command), **fabric.as_dict())


if __name__ == "__main__":
    main()
