#!/usr/bin/python
"""Measure the rails. Thin: `ansible.module_utils.sparkpair.fabric_bandwidth` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_bandwidth
short_description: Measure each rail alone and all at once, and judge what was measured
description:
  - With C(ib_write_bw) where the node has RDMA devices, with C(iperf3) where it has none, which the result says.
  - O(state=listening) on all nodes, O(state=measured) on one after the other, then O(state=stopped) on all.
author: sparkpair
attributes:
  check_mode: {support: full, description: Measures nothing.}
  diff_mode: {support: none, description: Changes nothing that stays.}
options:
  state: {description: What to do., type: str, choices: [listening, measured, stopped], required: true}
  rank: {description: Position of this node in the cluster., type: int, required: true}
  servers: {description: Ranks that this node sends to., type: list, elements: int, default: []}
  before: {description: The RV(errors) of O(state=listening)., type: dict, default: {}}
  names: {description: Names of all nodes in rank order., type: list, elements: str, required: true}
  rails: {description: Rails as fabric_info returns them., type: list, elements: dict, required: true}
  seconds: {description: How long each measurement lasts., type: int, default: 5}
  verdicts: {description: Rows of floor (Gb/s) and verdict for one rail and for all., type: dict, default: {}}
  sysfs_root: {description: Where sysfs is mounted., type: path, default: /sys}
"""

EXAMPLES = r"""
- name: Measure the rails
  fabric_bandwidth:
    state: measured
    rank: 1
    servers: [0]
    names: [spark-a, spark-b]
    rails: "{{ __fabric_info.rails }}"
"""

RETURN = r"""
rows:
  description: One row for each measurement; with O(state=stopped) one for each rail that counted errors.
  type: list
  elements: dict
  returned: state=measured or stopped
errors: {description: Error counters of each RDMA device., type: dict, returned: state=listening}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import fabric_bandwidth as bandwidth


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listening", "measured", "stopped"], "required": True},
            "rank": {"type": "int", "required": True},
            "servers": {"type": "list", "elements": "int", "default": []},
            "before": {"type": "dict", "default": {}},
            "names": {"type": "list", "elements": "str", "required": True},
            "rails": {"type": "list", "elements": "dict", "required": True},
            "seconds": {"type": "int", "default": 5},
            "verdicts": {"type": "dict", "default": {}},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    p = module.params
    rdma, sysfs = bandwidth.has_rdma(), Path(p["sysfs_root"])
    if module.check_mode:
        module.exit_json(changed=False, rows=[])
    if p["state"] == "stopped":
        bandwidth.hush(p["rails"], module.run_command)
        found = bandwidth.count(p["names"][p["rank"]], p["rails"], p["before"], sysfs)
        module.exit_json(changed=False, rows=bandwidth.as_rows(found))
    module.get_bin_path("ib_write_bw" if rdma else "iperf3", required=True)
    rows = []
    try:
        if p["state"] == "listening":
            bandwidth.listen(p["rails"], p["rank"], p["seconds"], rdma, sysfs, module.run_command)
            module.exit_json(changed=False, errors=bandwidth.errors(p["rails"], sysfs))
        for server in p["servers"]:
            peers = f"{p['names'][p['rank']]} -> {p['names'][server]}"
            found = bandwidth.measure(p["rails"], p["rank"], server, peers, p["seconds"], rdma, sysfs)
            rows += bandwidth.as_rows([bandwidth.judge(one, p["verdicts"], p["seconds"]) for one in found])
    except ValueError as error:
        module.fail_json(msg=f"{p['names'][p['rank']]}: {error}")
    module.exit_json(changed=False, rows=rows)


if __name__ == "__main__":
    main()
