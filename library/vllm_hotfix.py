#!/usr/bin/python
"""Patch vLLM's scheduler. Thin: arguments in, `ansible.module_utils.sparkpair.hotfix` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_hotfix
short_description: Put the partial-prefill admission hotfix into an installed vLLM, or take it out
description:
  - Adds hooks to vLLM's v1 scheduler and installs the module that they call beside it.
  - Refuses, and writes nothing, where a hook does not fit exactly once or another hotfix is in the file.
  - In check mode an environment that does not exist yet is reported as C(absent) and not refused.
options:
  venv: {description: Virtual environment that holds vLLM (a symlink will do), type: path}
  site_packages: {description: Folder that holds the C(vllm) package, type: path}
  state: {description: Whether the hotfix is in, type: str, choices: [present, absent], default: present}
attributes:
  check_mode: {support: full, description: Predicts the result}
  diff_mode: {support: full, description: Shows the hooks and the module}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Patch the scheduler
  vllm_hotfix:
    venv: /opt/sparkpair/current
"""

RETURN = r"""
status:
  description: One of original, patched, patched-older, foreign, unsupported, not-needed, absent.
  type: str
  returned: always
detail: {description: What stands behind the status, type: str, returned: always}
found: {description: "status, detail, digest and vllm_version as they were before", type: dict, returned: success}
digest:
  description: SHA-256 of the scheduler and the module beside it; equal on every node of a pair. Empty when predicted.
  type: str
  returned: always
revision: {description: Revision of the hotfix in the file; 0 when there is none, type: int, returned: when found}
modified: {description: When the scheduler was last replaced (seconds since 1970), type: float, returned: when found}
vllm_version: {description: Version of vLLM found there, type: str, returned: always}
site_packages: {description: Folder that was worked on, type: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.hotfix import converge
from ansible.module_utils.sparkpair.hotfix_patcher import HotfixError


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path"},
            "site_packages": {"type": "path"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        mutually_exclusive=[("venv", "site_packages")],
        required_one_of=[("venv", "site_packages")],
        supports_check_mode=True,
    )
    p = module.params
    try:
        result = converge(p["venv"], p["site_packages"], p["state"], module.check_mode)
    except HotfixError as error:
        module.fail_json(msg=str(error), status=getattr(error, "status", "error"))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or p['venv'] or p['site_packages']}: {error.strerror}", status="error")
    if result["status"] == "not-needed":
        module.warn(f"hotfix not applied: {result['detail']}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
