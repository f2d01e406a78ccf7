"""What a node is, and whether it can take part. Reads only."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
# vLLM publishes wheels for glibc 2.35 and newer; a Spark has 2.39, the lab's Debian 12 has 2.36.
MINIMUM_PYTHON = (3, 11)
# Nodes that differ by more confuse logs and TLS; a controller under load adds a second or two to the reading.
CLOCK_TOLERANCE_S = 30.0


def parse_keys(text: str) -> dict[str, str]:
    """`KEY=value` and `KEY="value"` lines (os-release, dgx-release); the last of a repeated key wins."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes by name; lines without a number are left out."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isascii() and words[0].isdigit() and len(words[0]) < 20:
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def read_text(path: Path) -> str:
    """The file's text, or an empty string when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_bytes(path: str) -> int:
    """Free bytes of the file system that holds `path` or will hold it (nearest existing parent)."""
    folder = Path(path)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def account(name: str) -> tuple[int | None, int | None]:
    """Numeric id and group of a user, or None when there is no such user."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None, None
    return found.pw_uid, found.pw_gid


def is_filled(path: Path) -> bool:
    """Whether the environment or the weights that belong below `path` are there already."""
    return (path / "current").exists() or (path / "models" / "current").exists()


def read_node(paths: Sequence[str], users: Sequence[str]) -> dict[str, Any]:
    """What the system is: everything that `node_info` documents but the login's uid and `facts.read_facts`."""
    release = parse_keys(read_text(Path("/etc/os-release")))
    dgx = parse_keys(read_text(Path("/etc/dgx-release")))
    memory = parse_meminfo(read_text(Path("/proc/meminfo")))
    return {
        "os": f"{release.get('ID', 'unknown')} {release.get('VERSION_ID', '')}".strip(),
        # The factory build never changes; the last OTA line is what runs (public reports).
        "release": dgx.get("DGX_OTA_VERSION", dgx.get("DGX_SWBUILD_VERSION", "")),
        "arch": platform.machine(),
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "systemd": Path("/run/systemd/system").is_dir(),
        "memory_total": memory.get("MemTotal", 0),
        "memory_available": memory.get("MemAvailable", 0),
        # What is in place needs no room; the stages check the room for their own downloads.
        "disk_free": {path: free_bytes(path) for path in paths if not is_filled(Path(path))},
        "epoch": time.time(),
        "users": {name: account(name)[0] for name in users},
        "groups": {name: account(name)[1] for name in users},
        "uids": {str(entry.pw_uid): entry.pw_name for entry in pwd.getpwall()},
    }


def check_node(name: str, node: Mapping[str, Any], limits: Mapping[str, Any], now: float) -> list[str]:
    """Why one node cannot take part, as sentences.

    `limits`: memory_gib, disk_gib (path to GiB), service_user, service_uid. `now`: the controller's epoch in seconds.
    """
    faults = []
    python = tuple(int(part) for part in str(node["python"]).split(".")[:2])
    if python < MINIMUM_PYTHON:
        faults.append(f"{name}: found Python {node['python']}, expected 3.11 or newer: sudo apt-get install python3")
    if not node["systemd"]:
        faults.append(f"{name}: found no systemd as init, expected DGX OS or another systemd system")
    memory = node["memory_total"] / GIB
    if memory < float(limits["memory_gib"]):
        faults.append(
            f"{name}: found {memory:.1f} GiB of memory, expected at least {limits['memory_gib']} GiB "
            f"(preflight_memory_gib): free -g"
        )
    for path, free_there in node["disk_free"].items():
        free, needed = free_there / GIB, limits["disk_gib"][path]
        if free < float(needed):
            faults.append(
                f"{name}: found {free:.1f} GiB free for {path}, expected at least {needed} GiB "
                f"(preflight_disk_gib): df -h"
            )
    skew = float(node["epoch"]) - now
    if abs(skew) > CLOCK_TOLERANCE_S:
        faults.append(
            f"{name}: found its clock {skew:+.0f} s from the controller's, expected within "
            f"{CLOCK_TOLERANCE_S:.0f} s: sudo timedatectl set-ntp true"
        )
    user, uid = limits["service_user"], limits["service_uid"]
    if node["uids"].get(str(uid), user) != user:
        faults.append(
            f"{name}: found uid {uid} with user {node['uids'][str(uid)]}, expected it free for {user}: set serve_uid"
        )
    if node["users"].get(user) not in (None, uid):
        faults.append(
            f"{name}: found user {user} with uid {node['users'][user]}, expected {uid} on all nodes: "
            f"sudo usermod -u {uid} {user}, or set serve_uid"
        )
    return faults


def explain_failure(name: str, result: Mapping[str, Any], address: str) -> list[str]:
    """Why a node could not be read at all, as a sentence with what to try; empty when it was read."""
    message = " ".join(str(result.get("msg", "")).split()).split("over ssh: ")[-1]
    if result.get("unreachable"):
        return [f"{name}: found no SSH connection ({message}), expected one: ssh {address} by hand, until it works"]
    if not result.get("failed"):
        return []
    if "sudo" in message.lower() or "become" in message.lower() or "password" in message.lower():
        return [
            f"{name}: found no root rights ({message}), expected sudo to work: run with --ask-become-pass (-K) "
            f"and the password of the login user, or set ansible_become_password from a vault"
        ]
    return [
        f"{name}: found that it cannot be read ({message}), expected Python 3.11 or newer at ansible_python_interpreter"
    ]
