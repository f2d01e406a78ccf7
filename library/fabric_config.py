#!/usr/bin/python
"""Configure the rails of a node. Thin: `ansible.module_utils.sparkpair.fabric_config` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_config
short_description: Write, validate and apply the network plan of the rails, and take it back
description:
  - Writes the netplan file and the ARP settings, validates and applies them and waits for the addresses.
  - Keeps the state before in a journal until O(state=confirmed); O(state=reverted) restores it, and so does
    a timer on the node when no confirmation comes.
author: sparkpair
attributes:
  check_mode: {support: full, description: Validates and predicts; changes nothing.}
  diff_mode: {support: full, description: Shows files, kernel settings and interfaces.}
options:
  node: {description: Name of the node for messages., type: str, default: ''}
  state: {description: What to do., type: str, choices: [present, confirmed, reverted], default: present}
  rails: {description: Network interface and its address with prefix length., type: dict, required: true}
  mtu: {description: MTU of the rails in bytes., type: int, required: true}
  netplan_file: {description: The netplan file that is ours., type: path, required: true}
  netplan: {description: Content of the netplan file., type: str, default: ''}
  sysctl_file:
    description: The sysctl file that is ours.
    type: path
    default: /etc/sysctl.d/90-sparkpair-fabric.conf
  journal:
    description: Where the state before is kept.
    type: path
    default: /var/lib/sparkpair/fabric/journal.json
"""

EXAMPLES = r"""
- name: Configure the rails
  fabric_config:
    rails: {enp1s0f0np0: 192.168.176.1/24, enP2p1s0f0np0: 192.168.177.1/24}
    mtu: 9000
    netplan_file: /etc/netplan/40-sparkpair.yaml
    netplan: "{{ lookup('ansible.builtin.template', '40-sparkpair.yaml.j2') }}"
"""

RETURN = r"""
pending: {description: The plan was applied and waits for confirmation., type: bool, returned: always}
changes: {description: What differed from the plan., type: list, elements: str, returned: state=present}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.fabric_config import Config, confirm, converge, revert
from ansible.module_utils.sparkpair.plan import check_mtu

SPEC = {
    "node": {"type": "str", "default": ""},
    "state": {"type": "str", "choices": ["present", "confirmed", "reverted"], "default": "present"},
    "rails": {"type": "dict", "required": True},
    "mtu": {"type": "int", "required": True},
    "netplan_file": {"type": "path", "required": True},
    "netplan": {"type": "str", "default": ""},
    "sysctl_file": {"type": "path", "default": "/etc/sysctl.d/90-sparkpair-fabric.conf"},
    "journal": {"type": "path", "default": "/var/lib/sparkpair/fabric/journal.json"},
}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    p = module.params
    module.get_bin_path("netplan", required=True)
    files = {name: Path(p[name]) for name in ("netplan_file", "sysctl_file", "journal")}
    try:
        config = Config(rails=p["rails"], mtu=check_mtu(p["mtu"]), netplan_text=p["netplan"], **files)
        if p["state"] == "present":
            outcome = converge(config, module.run_command, module.check_mode)
            module.exit_json(
                changed=bool(outcome.changes),
                pending=outcome.pending,
                changes=[change.title for change in outcome.changes],
                diff=[change.diff() for change in outcome.changes],
            )
        pending = config.journal.is_file()
        if p["state"] == "reverted":
            changed = pending if module.check_mode else revert(config, module.run_command)
            module.exit_json(changed=changed, pending=False)
        if not module.check_mode:
            confirm(config, module.run_command)
        module.exit_json(changed=False, pending=False)
    except ValueError as error:
        module.fail_json(msg=f"{p['node']}: {error}" if p["node"] else str(error))


if __name__ == "__main__":
    main()
