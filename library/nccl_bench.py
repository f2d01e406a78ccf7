#!/usr/bin/python
"""Ansible module: measure NCCL over all nodes. One task on all of them: rank 0 leads, the others answer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_bench
short_description: Run nccl-tests' all_gather over all nodes as the service user, without ssh
description:
  - Run it on all nodes in one task. The head gives the program to the peers over the fabric and calls mpirun.
  - Everything ends within a bounded time, and nothing stays on a node but the program.
options:
  rank: {description: Rank of this node, type: int, required: true}
  addresses: {description: Addresses of rail 0 in rank order, type: list, elements: str, required: true}
  network: {description: Network of rail 0, type: str, required: true}
  port: {description: Port on which peers listen while the test runs, type: int, default: 25002}
  secret: {description: Random text of this run, type: str, required: true}
  user: {description: The service's user, type: str, required: true}
  groups: {description: Groups that own the GPU's device files, type: list, elements: str, default: []}
  folder: {description: Folder with all_gather_perf, type: path, required: true}
  hcas: {description: This node's RDMA devices in rail order, type: list, elements: str, required: true}
  environment: {description: This node's variables, type: dict, default: {}}
  available: {description: Least available memory of all nodes in bytes, type: int, required: true}
  sizes:
    description: Sizes of a run in GiB, of which the largest that fits is taken.
    type: list
    elements: int
    required: true
  margin: {description: Memory in GiB that stays free beside the buffers, type: int, required: true}
  iterations: {description: Repetitions, type: int, default: 20}
  seconds: {description: Longest time of one arm, type: int, default: 300}
  arms: {description: "What is compared: both, one, sockets", type: list, elements: str, default: [both]}
attributes:
  check_mode: {support: none, description: A measurement}
  diff_mode: {support: none, description: A measurement}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Measure NCCL
  nccl_bench:
    rank: 0
    addresses: [192.168.176.1, 192.168.176.2]
    network: 192.168.176.0/24
    secret: "{{ lookup('ansible.builtin.password', '/dev/null') }}"
    user: sparkpair
    folder: /opt/sparkpair/nccl-tests
    hcas: [rocep1s0f0, roceP2p1s0f0]
    available: 100000000000
    sizes: [16, 8, 4, 2]
    margin: 8
"""

RETURN = r"""
arms: {description: "verdict, bench, seconds, command and tail of each arm; on rank 0", type: dict, returned: success}
given: {description: Addresses that got the program, type: list, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import nccl, nccl_run
from ansible.module_utils.sparkpair.facts import tolerant
from ansible.module_utils.sparkpair.peer import PeerError


def main() -> None:
    text, number, words = {"type": "str", "required": True}, {"type": "int", "required": True}, {"type": "list"}
    module = AnsibleModule(
        argument_spec={
            "rank": number,
            "addresses": {**words, "elements": "str", "required": True},
            "network": text,
            "port": {"type": "int", "default": 25002},
            "secret": {**text, "no_log": True},
            "user": text,
            "groups": {**words, "elements": "str", "default": []},
            "folder": {"type": "path", "required": True},
            "hcas": {**words, "elements": "str", "required": True},
            "environment": {"type": "dict", "default": {}},
            "available": number,
            "sizes": {**words, "elements": "int", "required": True},
            "margin": number,
            "iterations": {"type": "int", "default": 20},
            "seconds": {"type": "int", "default": 300},
            "arms": {**words, "elements": "str", "default": ["both"], "choices": list(nccl.ARMS)},
        },
        supports_check_mode=True,
    )
    p = module.params
    sizes, margin, available = p.pop("sizes"), p.pop("margin"), p.pop("available")
    size = nccl.choose_size(available, sizes, margin)
    if module.check_mode or size is None:
        found = nccl.failed("no-memory", f"{available / nccl.GIB:.1f} GiB for {min(sizes)} GiB twice").as_dict()
        module.exit_json(changed=False, arms={} if module.check_mode else {p["arms"][0]: {"verdict": found}}, given=[])
    environment = {name: str(value) for name, value in p.pop("environment").items()}
    lists = {name: tuple(p.pop(name)) for name in ("addresses", "groups", "hcas", "arms")}
    plan = nccl_run.Plan(size=size or 0, folder=Path(p.pop("folder")), environment=environment, **lists, **p)
    run = tolerant(module.run_command)
    try:
        result = nccl_run.lead(plan, run) if plan.rank == 0 else nccl_run.listen(plan, run)
    except (PeerError, OSError) as error:
        module.fail_json(msg=f"nccl_bench: {error}; the nodes must be in the same run, and nothing may drop the fabric")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
