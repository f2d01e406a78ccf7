#!/usr/bin/python
"""Ansible module: pinned packages by apt, never a driver or a kernel."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_packages
short_description: Install and hold packages, unless that would touch a driver, a kernel, or remove anything
description:
  - Asks dpkg what is missing; only then apt, which simulates first. A plan that must not be is refused as a whole.
  - Waits for another apt, as the one that DGX OS runs at its first boot.
options:
  pinned: {description: Package name to the version (a glob) that is installed and held, type: dict, required: true}
  plain: {description: Packages in whatever version the distribution has, type: list, elements: str, default: []}
  never: {description: Package globs that no plan may touch, type: list, elements: str, required: true}
  refresh: {description: Read the lists again although nothing is missing, type: bool, default: false}
  lock_timeout: {description: Seconds to wait for another apt, type: int, default: 600}
attributes:
  check_mode: {support: full, description: Simulates with the lists that the node has}
  diff_mode: {support: full}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Install NCCL
  gpu_packages:
    pinned: {libnccl2: 2.28.9-*}
    never: [nvidia-driver*]
"""

RETURN = r"""
actions: {description: "What was done, or would be, in words", type: list, returned: success}
held: {description: Packages that were newly held, type: list, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import apt
from ansible.module_utils.sparkpair.facts import tolerant


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "pinned": {"type": "dict", "required": True},
            "plain": {"type": "list", "elements": "str", "default": []},
            "never": {"type": "list", "elements": "str", "required": True},
            "refresh": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    p = module.params
    module.run_command_environ_update = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    run = tolerant(module.run_command)
    pinned = {name: str(version) for name, version in p["pinned"].items()}
    installed = apt.parse_installed(run([*apt.QUERY, *pinned, *p["plain"]])[1])
    install, hold = apt.missing(pinned, p["plain"], installed)
    actions: list[str] = []
    try:
        if (install or p["refresh"]) and not module.check_mode:
            apt.patiently(run, ["apt-get", "-q", "update"], p["lock_timeout"])
        if install:
            actions = [str(action) for action in apt.simulate(run, install, p["never"])]
        if install and not module.check_mode:
            lock = ["-o", f"DPkg::Lock::Timeout={p['lock_timeout']}"]
            apt.patiently(run, ["apt-get", *apt.OPTIONS, *lock, *apt.INSTALL, *install], p["lock_timeout"])
        if hold and not module.check_mode:
            apt.patiently(run, ["apt-mark", "hold", *hold], p["lock_timeout"])
    except apt.AptError as error:
        module.fail_json(msg=str(error))
    after = "".join(f"{text}\n" for text in [*actions, *(f"hold {name}" for name in hold)])
    module.exit_json(changed=bool(install or hold), actions=actions, held=hold, diff={"before": "", "after": after})


if __name__ == "__main__":
    main()
