#!/usr/bin/python
"""Ansible module: the locked vLLM environment of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_env
short_description: Install the vLLM environment that a hash lock describes
description:
  - Builds C(root/envs/<digest>) from a hash lock with uv, proves it by importing vLLM, points C(root/current) at it.
  - What is running is not touched until the new environment is complete; an interrupted installation is started over.
  - C(wheels) puts the wheels of the lock on the head; C(shared) serves them on one address until all peers have them;
    C(copied) pulls them from there; C(current) installs them.
options:
  state: {description: What to do, type: str, default: current, choices: [current, wheels, shared, copied]}
  lock: {description: Text of the lock, type: str, required: true}
  uv_lock: {description: Text of the installer's pin, type: str, required: true}
  root: {description: Folder of all environments, type: path, default: /opt/sparkpair}
  python: {description: Interpreter of the environments, type: path, default: /usr/bin/python3}
  wheelhouse: {description: Folder on the head with all wheels; empty for the index, type: str, default: ""}
  keep: {description: Earlier environments that stay, type: int, default: 2}
  log: {description: Log of the installation, type: path, default: /var/log/sparkpair/vllm_env.log}
  rebuild: {description: Build a complete environment anew too from new downloads, type: bool, default: false}
  address: {description: Address of the head on the fabric, type: str, default: ""}
  port: {description: Port for the copy of the wheels, type: int, default: 25003}
  secret: {description: Token of this run's copy, type: str, default: ""}
  peers: {description: Nodes that will copy, type: int, default: 0}
  streams: {description: Pieces in flight at once, type: int, default: 8}
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
- name: Install the environment
  vllm_env:
    lock: "{{ lookup('ansible.builtin.file', 'locks/0.33.0-aarch64-cu130.txt') }}"
    uv_lock: "{{ lookup('ansible.builtin.file', 'locks/uv.txt') }}"
"""

RETURN = r"""
digest: {description: Name of the environment, type: str, returned: always, sample: 8d1c0f6a2b3e4d5f}
path: {description: Folder of the environment, type: str, returned: always}
python: {description: Its interpreter, type: str, returned: always}
vllm_version: {description: Version of vLLM in it, type: str, returned: always}
stale: {description: Whether anything was to be done, type: bool, returned: current}
complete: {description: Whether the environment was complete and as installed before, type: bool, returned: current}
manifest: {description: What the environment proved at installation; empty before, type: dict, returned: current}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import env_task
from ansible.module_utils.sparkpair.env import EnvError
from ansible.module_utils.sparkpair.env_lock import LockError
from ansible.module_utils.sparkpair.model import ModelError
from ansible.module_utils.sparkpair.wheel_download import WheelError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "current", "choices": ["current", "wheels", "shared", "copied"]},
            "lock": {"type": "str", "required": True},
            "uv_lock": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/opt/sparkpair"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "wheelhouse": {"type": "str", "default": ""},
            "keep": {"type": "int", "default": 2},
            "log": {"type": "path", "default": "/var/log/sparkpair/vllm_env.log"},
            "rebuild": {"type": "bool", "default": False},
            "address": {"type": "str", "default": ""},
            "port": {"type": "int", "default": 25003},
            "secret": {"type": "str", "default": "", "no_log": True},
            "peers": {"type": "int", "default": 0},
            "streams": {"type": "int", "default": 8},
        },
        supports_check_mode=True,
    )
    try:
        result = env_task.run(module.params, module.check_mode, module.warn)
    except (EnvError, LockError, WheelError, ModelError, OSError) as error:
        module.fail_json(msg=f"vllm_env: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
