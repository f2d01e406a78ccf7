#!/usr/bin/python
"""Configure the rails of a node. Thin: `ansible.module_utils.sparkpair.fabric_config` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_config
short_description: Write, validate and apply the network plan of the rails, and take it back
description:
  - Writes netplan, sysctl, hosts and firewall, validates and applies them and waits for the addresses.
  - Keeps the state before in a journal until O(state=confirmed); O(state=reverted) restores it, and so does
    a timer on the node when no confirmation comes. O(state=absent) restores what was there before the first run.
author: sparkpair
attributes:
  check_mode: {support: full, description: Validates and predicts; changes nothing.}
  diff_mode: {support: full, description: Shows files, kernel settings, interfaces and firewall.}
options:
  node: {description: Name of the node for messages., type: str, default: ''}
  state: {description: What to do., type: str, choices: [present, confirmed, reverted, absent], default: present}
  rails: {description: Rails as fabric_info returns them., type: list, elements: dict, default: []}
  rank: {description: Position of this node in the cluster., type: int, default: 0}
  names: {description: Names of all nodes in rank order for /etc/hosts., type: list, elements: str, default: []}
  ports: {description: TCP ports for peers alone; without it firewalls stay as they are., type: list, elements: int}
  meeting: {description: Where ranks meet if not on a rail; in rank order., type: list, elements: str, default: []}
  mtu: {description: MTU of the rails in bytes., type: int, default: 9000}
  netplan_file: {description: The netplan file that is ours., type: path, default: /etc/netplan/40-sparkpair.yaml}
  netplan: {description: Content of the netplan file., type: str, default: ''}
  run: {description: The RV(run) whose plan is confirmed or reverted., type: str, default: ''}
  confirm_seconds:
    description: When a plan that nobody confirmed is taken back.
    type: int
    default: 45
  journal:
    description: Where the state before is kept.
    type: path
    default: /var/lib/sparkpair/fabric/journal.json
"""

EXAMPLES = r"""
- name: Configure the rails
  fabric_config:
    rails: "{{ __fabric_info.rails }}"
    mtu: 9000
    netplan: "{{ lookup('ansible.builtin.template', '40-sparkpair.yaml.j2') }}"
"""

RETURN = r"""
pending: {description: The plan was applied and waits for confirmation., type: bool, returned: always}
run: {description: Name of this run., type: str, returned: state=present}
changes: {description: What differed from the plan., type: list, elements: str, returned: state=present or absent}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.fabric_config import run_task

SPEC = {
    "node": {"type": "str", "default": ""},
    "state": {"type": "str", "choices": ["present", "confirmed", "reverted", "absent"], "default": "present"},
    "rails": {"type": "list", "elements": "dict", "default": []},
    "rank": {"type": "int", "default": 0},
    "names": {"type": "list", "elements": "str", "default": []},
    "ports": {"type": "list", "elements": "int"},
    "meeting": {"type": "list", "elements": "str", "default": []},
    "mtu": {"type": "int", "default": 9000},
    "netplan_file": {"type": "path", "default": "/etc/netplan/40-sparkpair.yaml"},
    "netplan": {"type": "str", "default": ""},
    "run": {"type": "str", "default": ""},
    "confirm_seconds": {"type": "int", "default": 45},
    "journal": {"type": "path", "default": "/var/lib/sparkpair/fabric/journal.json"},
}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    module.get_bin_path("netplan", required=True)
    prefix = f"{module.params['node']}: " if module.params["node"] else ""
    try:
        result, sentences = run_task(module.params, module.run_command, module.check_mode)
    except ValueError as error:
        module.fail_json(msg=f"{prefix}{error}")
    for sentence in sentences:
        module.warn(f"{prefix}{sentence}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
