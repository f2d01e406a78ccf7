#!/usr/bin/python
"""Ansible module: the memory policy of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_policy
short_description: Swappiness, earlyoom, shared memory of sessions, and the page cache before a start
description:
  - Writes up to four small files and makes them count at once; stops nothing that runs.
  - earlyoom is configured where it is installed and never installed.
options:
  swappiness: {description: vm.swappiness; -1 leaves it, type: int, default: 1}
  earlyoom: {description: Arguments of earlyoom; empty leaves it, type: str, default: -m 2 -s 80}
  drop_caches: {description: Let the rank's agent drop the page cache before each start, type: bool, default: true}
  user: {description: The rank's user, type: str, default: sparkpair}
  keep_ipc: {description: logind keeps shared memory of users who logged out, type: bool, default: true}
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Set the memory policy
  memory_policy:
    swappiness: 1
"""

RETURN = r"""
files: {description: Files that changed, type: list, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import files, memory


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "swappiness": {"type": "int", "default": 1},
            "earlyoom": {"type": "str", "default": "-m 2 -s 80"},
            "drop_caches": {"type": "bool", "default": True},
            "keep_ipc": {"type": "bool", "default": True},
            "user": {"type": "str", "default": "sparkpair"},
        },
        supports_check_mode=True,
    )
    policy = memory.Policy(**module.params)
    root = Path("/")
    changed = {name: data for name, data in memory.wanted(policy, root).items() if files.differs(root / name, data)}
    shown = [files.diff(root / name, data) for name, data in changed.items()]
    apply = list(changed)
    if memory.SYSCTL not in apply and memory.swappiness_drifted(policy, root):
        apply.append(memory.SYSCTL)
    if not module.check_mode:
        for name, data in changed.items():
            files.put(root / name, data)
        # A file that went away has nothing to load, but units; its setting ends with the next boot.
        left = [name for name in apply if (root / name).exists() or memory.APPLY[name] == memory.RELOAD]
        for command in dict.fromkeys(memory.APPLY[name] for name in left):
            module.run_command(list(command), check_rc=True)
    module.exit_json(changed=bool(apply), files=[f"/{name}" for name in apply], diff=shown)


if __name__ == "__main__":
    main()
