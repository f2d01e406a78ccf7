#!/usr/bin/python
"""Ansible module: read what a node is, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
short_description: Operating system, Python, memory, disk, clock and users of a node
description: Reads files and the user database; changes nothing.
options:
  paths:
    description: Folders whose file system is measured; the nearest existing parent counts.
    type: list
    elements: str
    default: [/]
  users: {description: Users whose numeric id is reported (null when absent), type: list, elements: str, default: []}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Read the node
  node_info:
    paths: [/opt, /var/lib]
    users: [sparkpair]
"""

RETURN = r"""
node:
  description: >-
    Keys os (ID VERSION_ID of os-release), release (DGX OTA version or empty), arch, kernel, python, systemd (bool),
    memory_total and memory_available (bytes), disk_free (path to bytes), epoch (seconds), uid,
    users (name to uid or null).
  type: dict
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.node import read_node


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": ["/"]},
            "users": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    login = os.environ.get("SUDO_UID", str(os.getuid()))
    node = read_node(module.params["paths"], module.params["users"])
    module.exit_json(changed=False, node={**node, "uid": int(login)})


if __name__ == "__main__":
    main()
