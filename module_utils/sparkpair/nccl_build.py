"""Build nccl-tests once, by commit: the source's name is its content, so what was built is what was meant."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ansible.module_utils.sparkpair import files
from ansible.module_utils.sparkpair.facts import Run, sha256

PROGRAM = "all_gather_perf"
MANIFEST = "sparkpair-nccl-tests.json"
ARCHITECTURE = "-gencode=arch=compute_121,code=sm_121"
"""GB10."""


class BuildError(ValueError):
    """nccl-tests cannot be built; the text says which step failed and what mends it."""


def make_command(source: Path, cuda: str, mpi: str, jobs: int) -> list[str]:
    """`make` of the one program, with MPI, for GB10, against the system's NCCL."""
    build = source / "build"
    return [
        *("make", "-C", str(source / "src"), f"-j{jobs}", f"BUILDDIR={build}", "MPI=1", f"MPI_HOME={mpi}"),
        *(f"CUDA_HOME={cuda}", "NCCL_HOME=/usr", f"NVCC_GENCODE={ARCHITECTURE}"),
        *("os.build", f"{build}/{PROGRAM}"),
    ]


def is_built(folder: Path, commit: str) -> bool:
    """Whether `folder` holds the program of this commit, whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest["commit"] == commit and manifest["sha256"] == sha256(folder / PROGRAM) != "")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _step(run: Run, command: Sequence[str], mend: str) -> str:
    status, out, err = run(command)
    if status:
        last = " ".join("\n".join((err or out).splitlines()[-6:]).split())
        raise BuildError(f"found that `{' '.join(command[:6])} …` failed ({last[-400:]}), expected it to work: {mend}")
    return str(out)


def build(run: Run, folder: Path, repository: str, commit: str, cuda: str, mpi: str) -> None:
    """Build the program of `commit` into `folder`; it is whole there or was not touched. Raises BuildError."""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise BuildError(f"found accept_nccl_tests_commit={commit!r}, expected 40 hexadecimal digits of a commit")
    if shutil.which("git") is None or not Path(cuda, "bin/nvcc").exists():
        raise BuildError(f"found no git or no {cuda}/bin/nvcc, expected both: ansible-playbook playbooks/gpu.yml")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".nccl-tests-") as scratch:
        source = Path(scratch)
        online = "give the head a way to the repository, or point accept_nccl_tests at a folder with the program"
        _step(run, ["git", "-C", scratch, "init", "-q"], "df -h")
        _step(run, ["git", "-C", scratch, "fetch", "-q", "--depth=1", repository, commit], online)
        _step(run, ["git", "-C", scratch, "checkout", "-q", "FETCH_HEAD"], "df -h")
        have = _step(run, ["git", "-C", scratch, "rev-parse", "HEAD"], online).strip()
        if have != commit:
            raise BuildError(f"found commit {have} in {repository}, expected {commit}: accept_nccl_tests_commit")
        _step(run, make_command(source, cuda, mpi, os.cpu_count() or 1), "ansible-playbook playbooks/gpu.yml")
        data = (source / "build" / PROGRAM).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    files.put(folder / PROGRAM, data, 0o755)
    manifest = {"commit": commit, "sha256": digest, "repository": repository}
    files.put(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
