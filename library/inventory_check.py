#!/usr/bin/python
"""Ansible module: refuse an inventory that cannot work, before any node is touched."""

from __future__ import annotations

DOCUMENTATION = r"""
module: inventory_check
short_description: Validate every sparkpair variable of one host on the controller
description:
  - Checks names, types and choices against the argument specs of all roles, and the rules that span hosts.
  - Run it on the controller (C(delegate_to) localhost); it reads files below O(roles_path) and changes nothing.
options:
  node: {description: The host whose settings are checked, type: str, required: true}
  hosts: {description: The group in rank order, type: list, elements: str, required: true}
  settings: {description: Variable name to templated value, type: dict, required: true}
  addresses: {description: Management addresses or names of all hosts, type: list, elements: str, required: true}
  profile: {description: Name of the profile that is in use, type: str, default: ""}
  limited_to: {description: The hosts of this run, type: list, elements: str, default: []}
  roles_path: {description: Folder of the roles, type: path, required: true}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Refuse an inventory that cannot work
  inventory_check:
    node: "{{ inventory_hostname }}"
    hosts: "{{ groups['sparks'] }}"
    settings: {serve_max_inflight_prefills: 2}
    addresses: [192.0.2.1, 192.0.2.2]
    roles_path: roles
  delegate_to: localhost
"""

RETURN = r"""
values: {description: serve_user and serve_uid as they hold, type: dict, returned: success}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.yaml import yaml_load
from ansible.module_utils.sparkpair.inventory import check
from ansible.module_utils.sparkpair.profile import VERIFIED
from ansible.module_utils.sparkpair.profile import check as check_profile


def load_specs(roles_path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Role name -> options of its main argument spec."""
    files = sorted(roles_path.glob("*/meta/argument_specs.yml"))
    return {f.parts[-3]: yaml_load(f.read_text())["argument_specs"]["main"]["options"] for f in files}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "hosts": {"type": "list", "elements": "str", "required": True},
            "settings": {"type": "dict", "required": True},
            "addresses": {"type": "list", "elements": "str", "required": True},
            "profile": {"type": "str", "default": ""},
            "limited_to": {"type": "list", "elements": "str", "default": []},
            "roles_path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    roles = Path(p["roles_path"])
    specs = load_specs(roles)
    chosen = roles.parent / "profiles" / f"{p['profile']}.yml"
    profile = yaml_load(chosen.read_text()) if chosen.is_file() else {}
    if profile and (faults := check_profile(p["profile"], profile, specs)):
        module.fail_json(msg="\n".join(f"{p['node']}: {fault}" for fault in faults))
    faults, values = check(p["node"], p["hosts"], p["settings"], specs, p["addresses"], p["limited_to"])
    locks = sorted(lock.name for lock in (roles.parent / "locks").glob("*-*.txt"))
    if not faults and values["vllm_env_lock"] not in locks:
        faults = [f"{p['node']}: found vllm_env_lock={values['vllm_env_lock']}, expected one of {', '.join(locks)}"]
    if faults:
        module.fail_json(msg="\n".join(faults))
    if profile and profile["profile_evidence"] != VERIFIED and p["node"] == p["hosts"][0]:
        module.warn(f"profile {p['profile']}: {profile['profile_evidence']}: {', '.join(profile['profile_sources'])}")
    # Only what the next tasks need: other values may be secrets.
    needed = {name: values[name] for name in ("serve_user", "serve_uid")}
    module.exit_json(changed=False, values=needed)


if __name__ == "__main__":
    main()
