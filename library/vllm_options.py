#!/usr/bin/python
"""Ansible module: ask the installed vLLM whether it takes the options, before anything restarts with them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_options
short_description: Refuse engine options that the installed vLLM refuses
description:
  - Does nothing when the options are those in O(path) already; else asks vLLM's own parser and configuration.
  - Starts nothing and changes nothing.
options:
  text: {description: The options as vLLM's configuration file, type: str, required: true}
  path: {description: The file that holds the options in force, type: path, required: true}
  script: {description: The program that asks vLLM, type: str, required: true}
  python: {description: Python of vLLM's environment, type: path, required: true}
  model: {description: Folder of the model, type: path, required: true}
  arguments: {description: Further arguments of vllm serve, type: list, elements: str, default: []}
  environment: {description: Variables of the service, type: dict, default: {}}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Refuse options that vLLM refuses
  vllm_options:
    text: "max-model-len: 4096\n"
    path: /etc/sparkpair/engine.yaml
    script: "{{ lookup('ansible.builtin.file', 'check_options.py') }}"
    python: /opt/sparkpair/current/bin/python
    model: /var/lib/sparkpair/models/current
"""

RETURN = r"""
asked: {description: Whether vLLM was asked, type: bool, returned: success}
"""

import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.files import read


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "text": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "script": {"type": "str", "required": True},
            "python": {"type": "path", "required": True},
            "model": {"type": "path", "required": True},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    p = module.params
    # On a fresh node a check has no vLLM to ask.
    if read(Path(p["path"])) == p["text"] or not Path(p["python"]).exists():
        module.exit_json(changed=False, asked=False)
    with tempfile.TemporaryDirectory() as folder:
        candidate = Path(folder) / "engine.yaml"
        candidate.write_text(p["text"], encoding="utf-8")
        variables = {name: str(value) for name, value in p["environment"].items()}
        code, out, err = module.run_command(
            [p["python"], "-IB", "-", str(candidate), p["model"], *p["arguments"]],
            data=p["script"],
            environ_update={**variables, "HOME": folder, "XDG_CACHE_HOME": folder, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    if code != 0:
        said = (out.strip() or err.strip() or f"exit status {code}").splitlines()[-1]
        module.fail_json(
            msg=f"found options that the installed vLLM refuses ({said}), expected ones that it takes; nothing was "
            f"changed, what runs goes on: edit serve_engine_args in the inventory and run the playbook again"
        )
    module.exit_json(changed=False, asked=True)


if __name__ == "__main__":
    main()
