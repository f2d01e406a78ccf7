#!/usr/bin/python
"""Ansible module: the state of the pair as one table and as data, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pair_report
short_description: Judge the pair and show it as one table
description: Takes registered results of all nodes; run it on the controller. Writes nothing but O(dest).
options:
  nodes: {description: Node names in rank order, type: list, elements: str, required: true}
  results:
    description: Part (rank_info, fabric, hotfix, completion) to the registered results, one for each node.
    type: dict
    required: true
  want: {description: Variables that every process of the pair must have, type: dict, default: {}}
  engine: {description: Options of vllm serve that were asked for, type: dict, default: {}}
  patched: {description: Whether the hotfix must be in force, type: bool, default: true}
  older: {description: Whether an earlier hotfix will do, type: bool, default: false}
  api: {description: "Where the head's API may listen, as address:port", type: str, default: ""}
  play: {description: "How playbooks are run, for the sentences", type: str, default: ansible-playbook}
  strict: {description: Fail when anything is not proven, type: bool, default: true}
  dest: {description: File for the report as JSON; empty for none, type: str, default: ""}
attributes:
  check_mode: {support: full, description: Does not write O(dest)}
  diff_mode: {support: none, description: A report is no change}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Judge the pair
  pair_report:
    nodes: [spark-a, spark-b]
    results: {rank_info: [{}, {}]}
  delegate_to: localhost
"""

RETURN = r"""
table: {description: The pair as text, type: str, returned: always}
faults: {description: What is not proven, type: list, returned: always}
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.report import Wish, faults_of, table


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "list", "elements": "str", "required": True},
            "results": {"type": "dict", "required": True},
            "want": {"type": "dict", "default": {}},
            "engine": {"type": "dict", "default": {}},
            "patched": {"type": "bool", "default": True},
            "older": {"type": "bool", "default": False},
            "api": {"type": "str", "default": ""},
            "play": {"type": "str", "default": "ansible-playbook"},
            "strict": {"type": "bool", "default": True},
            "dest": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    nodes = {name: {part: found[rank] for part, found in p["results"].items()} for rank, name in enumerate(p["nodes"])}
    want = {name: str(value) for name, value in p["want"].items()}
    wish = Wish(want, p["patched"], p["play"], p["api"], p["engine"], p["older"])
    faults = faults_of(nodes, wish)
    shown = table(nodes, faults, module.check_mode)
    if p["dest"] and not module.check_mode:
        report = {"serving": not faults, "faults": faults, "nodes": nodes}
        Path(p["dest"]).write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if faults and p["strict"]:
        module.fail_json(msg=shown)
    module.exit_json(changed=False, table=shown, faults=faults)


if __name__ == "__main__":
    main()
