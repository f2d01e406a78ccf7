#!/usr/bin/python
"""Prove the rails of a node. Thin: `ansible.module_utils.sparkpair.fabric_ping` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_ping
short_description: Ping every peer over every rail at full MTU without fragmentation
description:
  - Run it on all nodes after all have their addresses, so that both directions are proven.
author: sparkpair
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, description: Reads only.}
options:
  rank: {description: Position of this node in the cluster., type: int, required: true}
  names: {description: Names of all nodes in rank order., type: list, elements: str, required: true}
  cages: {description: Cages of all nodes in rank order., type: list, elements: str, default: []}
  rails: {description: Rails as fabric_info returns them., type: list, elements: dict, required: true}
  mtu: {description: MTU in bytes that must pass., type: int, required: true}
  timeout: {description: Seconds for all paths together., type: int, default: 20}
"""

EXAMPLES = r"""
- name: Prove the rails
  fabric_ping:
    rank: 0
    names: [spark-a, spark-b]
    rails: "{{ __fabric_info.rails }}"
    mtu: 9000
"""

RETURN = r"""
paths:
  description: Every path that was proven, with the size of the packets and the mean round trip time.
  type: list
  elements: dict
  returned: success
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.fabric_ping import parity_warning, paths, prove_all


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "rank": {"type": "int", "required": True},
            "names": {"type": "list", "elements": "str", "required": True},
            "cages": {"type": "list", "elements": "str", "default": []},
            "rails": {"type": "list", "elements": "dict", "required": True},
            "mtu": {"type": "int", "required": True},
            "timeout": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    p = module.params
    module.get_bin_path("ping", required=True)
    warning = parity_warning(p["names"], p["cages"])
    if warning and p["rank"] == 0:
        module.warn(warning)
    todo = paths(p["rails"], p["rank"], p["names"], p["mtu"])
    try:
        proven = prove_all(todo, module.run_command, p["timeout"])
    except ValueError as error:
        module.fail_json(msg=f"{p['names'][p['rank']]}: {error}")
    module.exit_json(changed=False, paths=[asdict(path) for path in proven])


if __name__ == "__main__":
    main()
