"""What runs on a node: the rank's unit, its processes and their environment, and the digests it serves. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.node import read_node

UNIT = "sparkpair-rank.service"
UNIT_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "MainPID",
    "NRestarts",
    "ControlGroup",
    "InvocationID",
)


def parse_properties(text: str) -> dict[str, str]:
    """Output of `systemctl show -p …`: name to value."""
    return {key: value for key, _, value in (line.partition("=") for line in text.splitlines()) if key}


def process_ids(cgroup: Path) -> list[int]:
    """Ids of all processes in a cgroup and the cgroups below it; empty when it is gone."""
    found: list[int] = []
    for file in sorted(cgroup.rglob("cgroup.procs")) if cgroup.is_dir() else []:
        try:
            found += [int(line) for line in file.read_text().split()]
        except OSError:
            continue  # the cgroup went away while it was read
    return found


def read_process(pid: int, prefixes: Sequence[str], proc: Path = Path("/proc")) -> dict[str, Any] | None:
    """A process: pid, name (argv joined, 60 characters), and its variables that begin with one of `prefixes`.

    `env` is None when the process wrote over its environment, as vLLM's children do when they rename themselves
    (measured on 0.32): systemd gives every process of a unit an INVOCATION_ID. None when the process is gone.
    Needs root for processes of other users.
    """
    try:
        argv = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
        environment = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = [entry.decode(errors="replace").partition("=") for entry in environment if entry]
    name = " ".join(part.decode(errors="replace") for part in argv if part)
    found = {key: value for key, _, value in pairs if key.startswith(tuple(prefixes))}
    return {"pid": pid, "name": name[:60], "env": found if "INVOCATION_ID" in (key for key, _, _ in pairs) else None}


def read_vllm_version(root: Path) -> str:
    """Version of the vLLM in the current environment, from its metadata's folder name; empty when there is none."""
    found = sorted((root / "current" / "lib").glob("python3.*/site-packages/vllm-*.dist-info"))
    return found[0].name.removeprefix("vllm-").removesuffix(".dist-info") if found else ""


def read_system() -> str:
    """Operating system, DGX OS release where there is one, and kernel."""
    node = read_node([], [])
    return " ".join(part for part in (node["os"], node["release"], node["kernel"]) if part)


def expected_differences(want: Mapping[str, str], processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the environment of running processes differs from what was asked, one sentence for each variable."""
    readable = [process["env"] for process in processes if process["env"] is not None]
    wrong = {name: {env.get(name, "<unset>") for env in readable} - {value} for name, value in want.items()}
    return [
        f"found {name}={'/'.join(sorted(values))} in running processes, expected {want[name]}"
        for name, values in wrong.items()
        if values
    ]
