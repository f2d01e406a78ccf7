#!/usr/bin/python
"""Ansible module: measure RDMA over the rails. One task on all nodes: rank 0 asks, the others answer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_bandwidth
short_description: ib_write_bw over each rail alone and over all at once, as the service user
description:
  - Run it on all nodes in one task. Everything ends within a bounded time.
options:
  rank: {description: Rank of this node, type: int, required: true}
  nodes: {description: Number of nodes, type: int, required: true}
  rails: {description: Rails as fabric_info returns them, type: list, elements: dict, required: true}
  user: {description: The service's user, type: str, required: true}
  seconds: {description: Time of one measurement, type: int, default: 5}
  sysfs_root: {description: Where sysfs is mounted, type: path, default: /sys}
attributes:
  check_mode: {support: full, description: Measures nothing}
  diff_mode: {support: none, description: A measurement}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Measure the rails
  rdma_bandwidth:
    rank: 0
    nodes: 2
    rails: "{{ __fabric_info.rails }}"
    user: sparkpair
"""

RETURN = r"""
peers: {description: "peer, alone, together, verdict and remedy; on rank 0", type: list, returned: success}
"""

from collections.abc import Sequence
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import perftest_run
from ansible.module_utils.sparkpair.facts import tolerant
from ansible.module_utils.sparkpair.perftest import PerftestError
from ansible.module_utils.sparkpair.service_command import service_command


def main() -> None:
    number = {"type": "int", "required": True}
    module = AnsibleModule(
        argument_spec={
            "rank": number,
            "nodes": number,
            "rails": {"type": "list", "elements": "dict", "required": True},
            "user": {"type": "str", "required": True},
            "seconds": {"type": "int", "default": 5},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    p = module.params
    if module.check_mode:
        module.exit_json(changed=False, peers=[])
    plan = perftest_run.Plan(p["rank"], p["nodes"], tuple(p["rails"]), p["seconds"], Path(p["sysfs_root"]))

    def wrap(argv: Sequence[str], bound: int) -> list[str]:
        command: list[str] = service_command(p["user"], [], argv, bound, {"PATH": "/usr/local/bin:/usr/bin:/bin"})
        return command

    run, peers = tolerant(module.run_command), []
    try:
        if plan.rank == 0:
            peers = perftest_run.lead(plan, run, wrap)
        else:
            perftest_run.serve(plan, run, wrap)
    except PerftestError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, peers=peers)


if __name__ == "__main__":
    main()
