#!/usr/bin/python
"""Ansible module: stream one completion from the API on this node, and check that its key is asked for."""

from __future__ import annotations

DOCUMENTATION = r"""
module: completion_probe
short_description: Prove the endpoint by a streamed completion
description:
  - Sends one small request; changes nothing.
  - Fails when no text is streamed, or when a key is set but not asked for.
options:
  host: {description: Address of the API, type: str, default: 127.0.0.1}
  port: {description: Port of the API, type: int, default: 8000}
  model: {description: Served model name, type: str, required: true}
  prompt: {description: What is asked, type: str, default: Say hello.}
  tokens: {description: Most tokens of the answer, type: int, default: 32}
  key: {description: API key; empty for none, type: str, default: ""}
  timeout: {description: Seconds that any one read may take, type: float, default: 120}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Prove the endpoint
  completion_probe:
    model: tiny
"""

RETURN = r"""
completion: {description: "text, chunks, first_token_s, total_s, finish", type: dict, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.completion import ProbeError, ask, status_without_key


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 8000},
            "model": {"type": "str", "required": True},
            "prompt": {"type": "str", "default": "Say hello."},
            "tokens": {"type": "int", "default": 32},
            "key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "float", "default": 120},
        },
        supports_check_mode=True,
    )
    p = module.params
    where = f"{p['host']}:{p['port']}"
    mend = "journalctl -u sparkpair-rank on both nodes, then playbooks/restart.yml"
    try:
        done = ask(p["host"], p["port"], p["model"], p["prompt"], p["tokens"], p["key"], p["timeout"])
        open_status = status_without_key(p["host"], p["port"], p["timeout"]) if p["key"] else 401
    except ProbeError as error:
        module.fail_json(msg=f"found at {where}: {error}; expected a streamed completion of {p['model']}: {mend}")
    if open_status != 401:
        module.fail_json(
            msg=f"found HTTP {open_status} at {where}/v1/models without the key, expected 401: run playbooks/serve.yml"
        )
    module.exit_json(changed=False, completion=done.as_dict())


if __name__ == "__main__":
    main()
