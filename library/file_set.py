#!/usr/bin/python
"""Ansible module: several text files that belong together, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: file_set
short_description: Write a set of text files owned by root
description:
  - Replaces each file that differs atomically, makes missing folders, and changes nothing else.
options:
  files: {description: Absolute path to text, type: dict, required: true}
  modes: {description: "Absolute path to mode as an octal string; 0644 for the others", type: dict, default: {}}
  prune: {description: Folder in which files that the set does not name are removed, type: str, default: ""}
attributes:
  check_mode: {support: full, description: Predicts}
  diff_mode: {support: partial, description: Files of mode 0600 may hold secrets and are named but not shown}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Write two files
  file_set:
    files: {/etc/sparkpair/a: "1\n", /etc/sparkpair/b: "2\n"}
"""

RETURN = r"""
written: {description: Files that were or would be written, type: list, returned: success}
removed: {description: Files that were or would be removed, type: list, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "required": True},
            "modes": {"type": "dict", "default": {}},
            "prune": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    modes = {name: int(str(mode), 8) for name, mode in p["modes"].items()}
    try:
        write, remove = files.plan(p["files"], modes, p["prune"])
        diff = [
            {
                "before_header": name,
                "after_header": f"{name}: not shown, it may hold secrets",
                "before": "",
                "after": "",
            }
            if modes.get(name) == 0o600
            else {"before_header": name, "after_header": name, "before": files.read(Path(name)) or "", "after": text}
            for name, text in write.items()
        ]
        for name, text in write.items() if not module.check_mode else []:
            files.put(Path(name), text.encode(), modes.get(name, 0o644))
        for name in remove if not module.check_mode else []:
            Path(name).unlink()
    except OSError as error:
        module.fail_json(
            msg=f"found {error}, expected to write {', '.join(p['files'])}: mend the disk and run it again"
        )
    module.exit_json(changed=bool(write or remove), written=list(write), removed=remove, diff=diff)


if __name__ == "__main__":
    main()
