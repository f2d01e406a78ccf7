#!/usr/bin/python
"""Ansible module: keep what belongs to the environment in service, or put another one back in service."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_release
short_description: Keep an environment's unit, configuration and model, or go back to those of another one
description:
  - C(saved) keeps the files of the environment in service, and removes caches and files of environments that are gone.
  - C(restored) puts the files of another environment back and points the symlinks at it. The pair must be stopped.
  - In check mode C(restored) finds out whether that is possible, and changes nothing.
options:
  state: {description: What to do, type: str, default: saved, choices: [saved, restored]}
  files: {description: Files that belong to the environment in service, type: list, elements: path, default: []}
  to: {description: Environment to go to; empty for the last one that served, type: str, default: ""}
attributes:
  check_mode: {support: full, description: Predicts}
  diff_mode: {support: none, description: The files may hold secrets}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Go back to the environment that served before
  vllm_release:
    state: restored
"""

RETURN = r"""
env: {description: The environment that is put back, type: str, returned: restored}
serves: {description: That and its scheduler by one name, type: str, returned: restored}
patched: {description: Whether the hotfix is in it, type: bool, returned: restored}
engine: {description: Text of its options of vllm serve, type: str, returned: restored}
variables: {description: Variables by which its processes are known, type: dict, returned: restored}
paths: {description: Files and symlinks that change, type: list, elements: str, returned: restored}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import release
from ansible.module_utils.sparkpair.env import EnvError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "saved", "choices": ["saved", "restored"]},
            "files": {"type": "list", "elements": "path", "default": []},
            "to": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p, places = module.params, release.Places()
    try:
        if p["state"] == "saved":
            module.exit_json(changed=release.save(p["files"], places, module.check_mode))
        file = release.choose(p["to"], places)
        found, paths = release.restore(file, places, module.check_mode)
    except (release.ReleaseError, EnvError, OSError) as error:
        module.fail_json(msg=f"vllm_release: {error}")
    module.exit_json(
        changed=bool(paths),
        env=found.env,
        serves=found.serves,
        patched=found.patched,
        engine=found.files.get("/etc/sparkpair/engine.yaml", (0, ""))[1],
        variables=found.variables(places.settings),
        paths=paths,
    )


if __name__ == "__main__":
    main()
