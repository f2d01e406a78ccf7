#!/usr/bin/python
"""Ansible module: compare what the nodes are with what they must be, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_check
short_description: Refuse nodes that are unreachable, too small, unlike each other, or in a known-bad state
description: Takes the registered results of M(node_info) for all nodes; run it on the controller. Changes nothing.
options:
  results: {description: Node name to the registered result of node_info, type: dict, required: true}
  addresses: {description: "Node name to login and address, for the sentences", type: dict, default: {}}
  stage: {description: Which differences and known-bad states are fatal, type: str, default: preflight}
  limits:
    description: "memory_gib, disk_gib (path to GiB), service_user, service_uid; empty skips these checks"
    type: dict
    default: {}
  accepted: {description: Labels of the parity table that may differ, type: list, elements: str, default: []}
  nccl: {description: NCCL library that every node must have; empty for none, type: str, default: ""}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Refuse nodes that cannot serve together
  node_check:
    results: {spark-a: "{{ hostvars['spark-a']['result'] }}"}
    addresses: {spark-a: spark@192.0.2.11}
    limits: {memory_gib: 100, disk_gib: {/opt: 25}, service_user: sparkpair, service_uid: 870}
  delegate_to: localhost
"""

RETURN = r"""
checked: {description: Names of the nodes that were compared, type: list, returned: success}
table: {description: Every difference between the nodes as text, type: str, returned: always}
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.node_check import check


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "results": {"type": "dict", "required": True},
            "addresses": {"type": "dict", "default": {}},
            "stage": {"type": "str", "default": "preflight"},
            "limits": {"type": "dict", "default": {}},
            "accepted": {"type": "list", "elements": "str", "default": []},
            "nccl": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    verdict = check(p["results"], p["addresses"], p["stage"], p["limits"], p["accepted"], p["nccl"], time.time())
    for warning in verdict.warnings:
        module.warn(warning)
    if verdict.faults:
        module.fail_json(msg="\n".join([*verdict.faults, *filter(None, [verdict.table])]), table=verdict.table)
    module.exit_json(changed=False, checked=list(p["results"]), table=verdict.table)


if __name__ == "__main__":
    main()
