#!/usr/bin/python
"""Ansible module: wait until the agent of this node says that the pair serves."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_wait
short_description: Wait for a pair that serves
description:
  - Asks the rank agent on its local socket until the pair serves. Fails at once when the agents gave up.
options:
  node: {description: Name of the node for messages, type: str, required: true}
  socket: {description: The agent's socket, type: path, default: /run/sparkpair-rank/agent.sock}
  timeout: {description: Longest wait in seconds, type: float, default: 1800}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Wait until the pair serves
  rank_wait:
    node: spark-a
"""

RETURN = r"""
agent: {description: The agent's state, type: dict, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.agent import wait_until_serving


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "socket": {"type": "path", "default": "/run/sparkpair-rank/agent.sock"},
            "timeout": {"type": "float", "default": 1800},
        },
        supports_check_mode=True,
    )
    state, fault = wait_until_serving(Path(module.params["socket"]), module.params["timeout"])
    if fault:
        module.fail_json(
            msg=f"{module.params['node']}: {fault}: journalctl -u sparkpair-rank on both nodes", agent=state
        )
    module.exit_json(changed=False, agent=state)


if __name__ == "__main__":
    main()
