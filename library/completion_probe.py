#!/usr/bin/python
"""Ansible module: stream one completion from the API on this node, and check who may ask for what."""

from __future__ import annotations

DOCUMENTATION = r"""
module: completion_probe
short_description: Prove the endpoint by a streamed completion
description:
  - Sends one small request; changes nothing.
  - Fails when no text is streamed within the time, when a route answers without the key, or when a key does not open.
  - With O(outside), for the other nodes, fails when a route answers that is closed to a network.
options:
  host: {description: Address of the API, type: str, default: 127.0.0.1}
  port: {description: Port of the API, type: int, default: 8000}
  model: {description: Served model name, type: str, required: true}
  prompt: {description: What is asked, type: str, default: Say hello.}
  tokens: {description: Most tokens of the answer, type: int, default: 32}
  key_file: {description: "File with the API's keys, one a line; without one, none is sent", type: path, required: true}
  timeout: {description: Seconds that one answer may take, type: float, default: 120}
  outside: {description: The API is on another node and no completion is asked for, type: bool, default: false}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Prove the endpoint
  completion_probe:
    model: tiny
    key_file: /etc/sparkpair/api-keys
"""

RETURN = r"""
completion: {description: "text, chunks, first_token_s, total_s, finish", type: dict, returned: not O(outside)}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.completion import ProbeError, ask, guard_faults, network_faults
from ansible.module_utils.sparkpair.files import read


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 8000},
            "model": {"type": "str", "required": True},
            "prompt": {"type": "str", "default": "Say hello."},
            "tokens": {"type": "int", "default": 32},
            "key_file": {"type": "path", "required": True, "no_log": False},
            "timeout": {"type": "float", "default": 120},
            "outside": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    p = module.params
    where = f"{p['host']}:{p['port']}"
    mend = "journalctl -u sparkpair-rank on both nodes, then playbooks/restart.yml"
    keys = (read(Path(p["key_file"])) or "").split()
    done = {}
    try:
        if p["outside"]:
            faults = network_faults(p["host"], p["port"], p["timeout"])
        else:
            done["completion"] = ask(
                p["host"], p["port"], p["model"], p["prompt"], p["tokens"], keys[0] if keys else "", p["timeout"]
            ).as_dict()
            faults = guard_faults(p["host"], p["port"], keys, p["timeout"]) if keys else []
    except ProbeError as error:
        if p["outside"]:
            module.exit_json(changed=False, closed=str(error))
        module.fail_json(msg=f"found at {where}: {error}; expected a streamed completion of {p['model']}: {mend}")
    if faults:
        module.fail_json(msg=f"found at {where}: {'; '.join(faults)}: run playbooks/serve.yml")
    module.exit_json(changed=False, **done)


if __name__ == "__main__":
    main()
