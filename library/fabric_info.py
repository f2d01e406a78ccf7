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
  names: {description: Names of all nodes in rank order., type: list, elements: str, required: true}
  cage: {description: Cage to use (p0 or p1); empty finds the one with a cable., type: str, default: ''}
  hosts:
    description: Management addresses of all nodes in rank order, to ask for where both cages have a cable.
    type: list
    elements: str
    default: []
  ring: {description: Three nodes in a ring instead of a pair or a switch., type: bool, default: false}
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
    names: "{{ groups['sparks'] }}"
  register: __fabric_info
"""

RETURN = r"""
cage: {description: The chosen cage., type: str, returned: always, sample: p0}
rails:
  description: One entry per rail with netdev, hca, carrier, mtu, speed, present and planned addresses.
  type: list
  elements: dict
  returned: always
meeting: {description: Address and netdev at which all ranks reach this one., type: dict, returned: always}
vendor: {description: Vendor of the board; OEM units differ from NVIDIA's own in firmware., type: str, returned: always}
environment: {description: NCCL's variables for this topology., type: dict, returned: always}
cages: {description: All ports of the adapter by cage., type: dict, returned: always}
default_route_interfaces: {description: Interfaces of default routes., type: list, returned: always}
problems: {description: What makes the rails slow., type: list, returned: always}
managers: {description: Who manages each rail (netplan NetworkManager networkd)., type: dict, returned: success}
renderer: {description: Renderer of plans that name none; empty for networkd., type: str, returned: success}
foreign_addresses: {description: Addresses on rails that are not of the plan., type: dict, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.fabric_reader import read_node
from ansible.module_utils.sparkpair.facts import tolerant


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "subnet": {"type": "str", "required": True},
            "rank": {"type": "int", "required": True},
            "names": {"type": "list", "elements": "str", "required": True},
            "cage": {"type": "str", "default": ""},
            "hosts": {"type": "list", "elements": "str", "default": []},
            "ring": {"type": "bool", "default": False},
            "allow_degraded": {"type": "bool", "default": False},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    prefix = f"{module.params['node']}: " if module.params["node"] else ""
    try:
        found = read_node(module.params, tolerant(module.run_command))
    except ValueError as error:
        module.fail_json(msg=f"{prefix}{error}")
    if found["problems"] and not module.params["allow_degraded"]:
        module.fail_json(msg=f"{prefix}{'; '.join(found['problems'])}", **found)
    for problem in found["problems"]:
        module.warn(f"{prefix}{problem}")
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
