#!/usr/bin/python
"""Ansible module: compare what the nodes are with what they must be, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_check
short_description: Refuse nodes that are unreachable, too small, skewed or unlike each other
description: Takes the registered results of M(node_info) for all nodes; run it on the controller. Changes nothing.
options:
  results: {description: Node name to the registered result of node_info, type: dict, required: true}
  addresses: {description: "Node name to login and address, for the sentences", type: dict, required: true}
  limits: {description: "memory_gib, disk_gib (path to GiB), service_user, service_uid", type: dict, required: true}
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
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.node import check_node, check_parity, explain_failure


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "results": {"type": "dict", "required": True},
            "addresses": {"type": "dict", "required": True},
            "limits": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    results, limits = module.params["results"], module.params["limits"]
    addresses = module.params["addresses"]
    faults = [fault for name, result in results.items() for fault in explain_failure(name, result, addresses[name])]
    if not faults:
        nodes = {name: result["node"] for name, result in results.items()}
        faults = [fault for name in nodes for fault in check_node(name, nodes[name], limits, time.time())]
        faults += check_parity(nodes)
    if faults:
        module.fail_json(msg="\n".join(faults))
    module.exit_json(changed=False, checked=list(results))


if __name__ == "__main__":
    main()
