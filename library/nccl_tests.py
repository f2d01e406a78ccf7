#!/usr/bin/python
"""Ansible module: nccl-tests, built once by commit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_tests
short_description: Build all_gather_perf of one commit of nccl-tests, with MPI, for GB10
description: Does nothing where O(folder) holds the program of that commit. Run it on the head.
options:
  folder: {description: Where the program lies, type: path, required: true}
  repository: {description: Address of the source, type: str, required: true}
  commit: {description: Commit that is built, 40 hexadecimal digits, type: str, required: true}
  cuda: {description: CUDA toolkit, type: path, default: /usr/local/cuda}
  mpi: {description: Open MPI's folder, type: path, default: /usr/lib/aarch64-linux-gnu/openmpi}
attributes:
  check_mode: {support: full}
  diff_mode: {support: none, description: A program has no diff}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Build nccl-tests
  nccl_tests:
    folder: /opt/sparkpair/nccl-tests
    repository: https://github.com/NVIDIA/nccl-tests.git
    commit: a0b82b2260cf5152b9f8c061bbf7eaf0ba096432
"""

RETURN = r"""
program: {description: Path of the program, type: str, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import nccl_build
from ansible.module_utils.sparkpair.facts import tolerant


def main() -> None:
    text = {"type": "str", "required": True}
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "repository": text,
            "commit": text,
            "cuda": {"type": "path", "default": "/usr/local/cuda"},
            "mpi": {"type": "path", "default": "/usr/lib/aarch64-linux-gnu/openmpi"},
        },
        supports_check_mode=True,
    )
    p = module.params
    folder = Path(p["folder"])
    built = nccl_build.is_built(folder, p["commit"])
    if not built and not module.check_mode:
        try:
            nccl_build.build(tolerant(module.run_command), folder, p["repository"], p["commit"], p["cuda"], p["mpi"])
        except (nccl_build.BuildError, OSError) as error:
            module.fail_json(msg=f"nccl_tests: {error}")
    module.exit_json(changed=not built, program=str(folder / nccl_build.PROGRAM))


if __name__ == "__main__":
    main()
