#!/usr/bin/python
"""Ansible module: the locked vLLM environment of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_env
short_description: Install the vLLM environment that a hash lock describes
description:
  - Builds C(root/envs/<digest>) from a hash lock with uv, proves it by importing vLLM, points C(root/current) at it.
  - What is running is not touched until the new environment is complete; an interrupted installation is started over.
options:
  lock: {description: Text of the lock, type: str, required: true}
  uv_lock: {description: Text of the installer's pin, type: str, required: true}
  root: {description: Folder of all environments, type: path, default: /opt/sparkpair}
  python: {description: Interpreter of the environments, type: path, default: /usr/bin/python3}
  wheelhouse: {description: Folder on the node with all wheels; empty for the index, type: str, default: ""}
  log: {description: Log of the installation, type: path, default: /var/log/sparkpair/vllm_env.log}
  rebuild: {description: Build a complete environment anew too from new downloads, type: bool, default: false}
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
manifest: {description: What the environment proved at installation; empty before, type: dict, returned: always}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import env
from ansible.module_utils.sparkpair.env_lock import LockError, parse_lock, parse_requirements


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "str", "required": True},
            "uv_lock": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/opt/sparkpair"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "wheelhouse": {"type": "str", "default": ""},
            "log": {"type": "path", "default": "/var/log/sparkpair/vllm_env.log"},
            "rebuild": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    wish = module.params
    try:
        plan = env.Plan(
            root=Path(wish["root"]),
            lock=parse_lock(wish["lock"]),
            lock_text=wish["lock"],
            uv=parse_requirements(wish["uv_lock"])[0],
            python=env.inspect_python(wish["python"]),
            wheelhouse=Path(wish["wheelhouse"]) if wish["wheelhouse"] else None,
            log=Path(wish["log"]),
        )
        env.require_fit(plan.lock, plan.python)
        before = env.current_name(plan.root)
        manifest, damage = env.judge(plan.path)
        if damage:
            module.warn(f"vllm_env: {plan.path} is damaged and built anew: {damage}")
        changed = not manifest or before != plan.digest or wish["rebuild"]
        if changed and not module.check_mode:
            manifest = env.install(plan, wish["rebuild"])
            env.switch(plan)
    except (env.EnvError, LockError, OSError) as error:
        module.fail_json(msg=f"vllm_env: {error}")
    module.exit_json(
        changed=changed,
        digest=plan.digest,
        path=str(plan.path),
        python=str(plan.path / "bin" / "python"),
        vllm_version=plan.lock.version_of("vllm"),
        manifest=manifest or {},
        diff={"before": f"{before}{', ' + damage if damage else ''}\n", "after": f"{plan.digest}\n"},
    )


if __name__ == "__main__":
    main()
