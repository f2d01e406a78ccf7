#!/usr/bin/python
"""Ansible module: the weights of a model on a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Fetch, copy and choose the weights of a model
description:
  - C(present) takes a pinned revision from a folder of this node or from the hub; for the head.
  - C(shared) serves the complete weights on one address until all peers have them; C(copied) pulls them from there.
  - C(current) points the symlink at them, C(listed) says what they will take.
  - In check mode it only reports what is missing.
options:
  node: {description: Name of the node in messages, type: str, required: true}
  state: {description: What to do, type: str, default: current, choices: [current, listed, present, shared, copied]}
  root: {description: Folder of all models, type: path, default: /var/lib/sparkpair/models}
  name: {description: Name of the model, type: str, required: true}
  revision: {description: Revision; a commit when the weights come from the hub, type: str, required: true}
  source: {description: Folder on this node to take the weights from, type: str, default: ""}
  repo: {description: Repository on the hub to take the weights from, type: str, default: ""}
  token: {description: Token for the hub, type: str, default: ""}
  ignore: {description: Files of the repository that are left out (patterns), type: list, elements: str, default: []}
  python: {description: Python that has huggingface_hub, type: path, default: /opt/sparkpair/current/bin/python}
  verify: {description: Read every byte and fetch again what is damaged, type: bool, default: false}
  address: {description: Address of the head on the fabric, type: str, default: ""}
  port: {description: Port for the copy, type: int, default: 25002}
  secret: {description: Token of this run's copy, type: str, default: ""}
  peers: {description: Nodes that will copy, type: int, default: 0}
  streams: {description: Pieces in flight at once, type: int, default: 8}
  log: {description: Log of long steps, type: path, default: /var/log/sparkpair/model.log}
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Use the weights that are on the node
  model_files: {node: spark-a, name: qwen3-4b, revision: cdbee75f17c01a7cc42f958dc650907174af0554}
"""

RETURN = r"""
path: {description: Folder of the weights, type: str, returned: always}
digest: {description: Digest over all files; empty when the weights are not complete, type: str, returned: always}
needed: {description: Whether the weights or the symlink were not in place before, type: bool, returned: always}
complete: {description: Whether the weights were complete before, type: bool, returned: always}
touched: {description: How many files were read again because they looked changed, type: int, returned: always}
listing: {description: 'With C(listed): size and weights in bytes, config', type: dict, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import model_task
from ansible.module_utils.sparkpair.model import ModelError

STATES = ["current", "listed", "present", "shared", "copied"]


def main() -> None:
    """Run the module."""
    text = {"type": "str", "default": ""}
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "state": {"type": "str", "default": "current", "choices": STATES},
            "root": {"type": "path", "default": "/var/lib/sparkpair/models"},
            "name": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "source": text,
            "repo": text,
            "token": {**text, "no_log": True},
            "ignore": {"type": "list", "elements": "str", "default": []},
            "python": {"type": "path", "default": "/opt/sparkpair/current/bin/python"},
            "verify": {"type": "bool", "default": False},
            "address": text,
            "port": {"type": "int", "default": 25002},
            "secret": {**text, "no_log": True},
            "peers": {"type": "int", "default": 0},
            "streams": {"type": "int", "default": 8},
            "log": {"type": "path", "default": "/var/log/sparkpair/model.log"},
        },
        supports_check_mode=True,
    )
    try:
        result = model_task.run(module.params, check=module.check_mode)
    except (ModelError, OSError) as error:
        module.fail_json(msg=f"{module.params['node']}: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
