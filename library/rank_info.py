#!/usr/bin/python
"""Ansible module: read what a rank serves and what really runs, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_info
short_description: The rank's unit, its processes with their variables, and the digests on disk
description:
  - Reads systemd, /proc, the journal and files; changes nothing.
  - Needs root for the processes of the service user.
options:
  root: {description: Folder of the environments, type: path, default: /opt/sparkpair}
  model: {description: The symlink to the model in use, type: path, default: /var/lib/sparkpair/models/current}
  nccl: {description: The NCCL that serves; empty for the wheel's, type: str, default: ""}
  prefixes:
    description: Beginnings of the variables of processes that are reported.
    type: list
    elements: str
    default: [DSPARK_, SPARKPAIR_]
  packages:
    description: Debian packages whose version is reported.
    type: list
    elements: str
    default: [cuda-toolkit-13-0, libnccl2]
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Read the rank
  rank_info:
"""

RETURN = r"""
unit: {description: Properties of the unit by systemd's names, type: dict, returned: success}
processes: {description: "pid, name and env of every process of the unit but the agent", type: list, returned: success}
agent: {description: The live state of the rank agent, type: dict, returned: success}
listeners: {description: "Where the unit listens, as address:port", type: list, returned: success}
closed_ports: {description: TCP ports that are closed off the fabric, type: list, returned: success}
scheduler:
  description: What hotfix_log.built reads of the running scheduler; null on ranks above 0, which build none.
  type: dict
  returned: success
packages: {description: Name to version of the O(packages) that are installed, type: dict, returned: success}
system: {description: "Operating system, DGX release and kernel", type: str, returned: success}
vllm: {description: Version of the vLLM in use, type: str, returned: success}
hotfix: {description: Status of the scheduler on disk as M(vllm_hotfix) tells it, type: str, returned: success}
digests: {description: "What is on disk: env, packages, scheduler, model and others", type: dict, returned: success}
serves: {description: The environment and the scheduler in it by one name, type: str, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import agent, digests, hotfix, hotfix_log, rank


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/sparkpair"},
            "model": {"type": "path", "default": "/var/lib/sparkpair/models/current"},
            "nccl": {"type": "str", "default": ""},
            "prefixes": {"type": "list", "elements": "str", "default": ["DSPARK_", "SPARKPAIR_"]},
            "packages": {"type": "list", "elements": "str", "default": ["cuda-toolkit-13-0", "libnccl2"]},
        },
        supports_check_mode=True,
    )
    p = module.params
    _, shown, _ = module.run_command(
        ["systemctl", "show", rank.UNIT, "-p", ",".join(rank.UNIT_PROPERTIES)], check_rc=True
    )
    unit = rank.parse_properties(shown)
    # An empty ControlGroup would name the root of all cgroups.
    pids = (
        rank.process_ids(Path("/sys/fs/cgroup") / unit["ControlGroup"].lstrip("/")) if unit.get("ControlGroup") else []
    )
    processes = [found for found in (rank.read_process(pid, p["prefixes"]) for pid in pids) if found]
    processes = [process for process in processes if str(process["pid"]) != unit.get("MainPID")]
    log: list[str] = []
    if unit.get("InvocationID"):
        query = ["journalctl", "-q", "--no-pager", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={unit['InvocationID']}"]
        log = module.run_command([*query, "--grep", r"\[issue27-hotfix\]"])[1].splitlines()
    on_disk = digests.read_digests(Path(p["root"]), Path(p["model"]), p["nccl"])
    # dpkg-query exits 1 when a package is unknown and still shows the others.
    listed = module.run_command(["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *p["packages"]])[1]
    # Without our table nft says so on standard error, and no port is closed.
    ruleset = module.run_command(["nft", "-j", "list", "table", "inet", "sparkpair"])[1]
    module.exit_json(
        changed=False,
        agent=agent.read_agent(),
        listeners=agent.listeners(pids),
        closed_ports=agent.closed_ports(ruleset),
        unit=unit,
        processes=processes,
        packages=dict(line.split() for line in listed.splitlines() if len(line.split()) == 2),
        system=rank.read_system(),
        vllm=rank.read_vllm_version(Path(p["root"])),
        scheduler=hotfix_log.built(log),
        hotfix=hotfix.read_status(Path(p["root"]) / "current"),
        digests=on_disk,
        serves=digests.serves(on_disk),
    )


if __name__ == "__main__":
    main()
