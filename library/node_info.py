#!/usr/bin/python
"""Ansible module: read what a node is, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
short_description: System, memory, driver, CUDA, NCCL, firmware, logs, leftovers and known-bad states of a node
description:
  - Reads files, the user database, dpkg, nvidia-smi, systemd and the journal; changes nothing.
  - Needs root for logs and for processes of other users.
options:
  paths:
    description: Folders whose file system is measured; the nearest existing parent counts.
    type: list
    elements: str
    default: [/]
  users: {description: Users whose numeric ids are reported (null when absent), type: list, elements: str, default: []}
  known_bad:
    description: Entries as in known_bad.yml; a later one replaces an earlier one of the same id.
    type: list
    elements: dict
    default: []
  accepted: {description: Ids of entries that are left out, type: list, elements: str, default: []}
  sysfs_root: {description: Where sysfs is mounted, type: path, default: /sys}
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
    memory_total and memory_available (bytes), disk_free (path to bytes), epoch (seconds), uid, users and groups
    (name to number or null), and the facts that module_utils/sparkpair/known_bad.py lists.
  type: dict
  returned: success
known_bad: {description: The entries that the node meets with their evidence, type: list, returned: success}
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.facts import read_facts, tolerant
from ansible.module_utils.sparkpair.known_bad import KnownBadError, judge, log_patterns, parse
from ansible.module_utils.sparkpair.node import read_node


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": ["/"]},
            "users": {"type": "list", "elements": "str", "default": []},
            "known_bad": {"type": "list", "elements": "dict", "default": []},
            "accepted": {"type": "list", "elements": "str", "default": []},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        entries = parse(p["known_bad"], p["accepted"])
    except KnownBadError as error:
        module.fail_json(msg=f"known_bad.yml or preflight_known_bad: {error}")
    facts = read_facts(tolerant(module.run_command), log_patterns(entries), sysfs=Path(p["sysfs_root"]))
    login = int(os.environ.get("SUDO_UID", str(os.getuid())))
    node = {**read_node(p["paths"], p["users"]), "uid": login, **facts}
    module.exit_json(changed=False, node=node, known_bad=[hit.as_dict() for hit in judge(entries, node)])


if __name__ == "__main__":
    main()
