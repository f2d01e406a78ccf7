"""The read-only Debian tree under every node, built once with debootstrap and cached under a digest of its recipe."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from lab import host
from lab.settings import LabError

SUITE = "bookworm"
PACKAGES = (
    # an init, its network and a way in
    "systemd", "systemd-sysv", "systemd-resolved", "udev", "dbus", "kmod", "netplan.io", "openssh-server", "sudo",
    # what Ansible and a Python environment need
    "python3", "python3-apt", "python3-venv", "apt-utils", "ca-certificates", "curl", "procps", "libnuma1",
    # network tools, as on DGX OS
    "nftables", "iproute2", "iputils-ping", "iperf3", "ethtool", "perftest", "rdma-core", "ibverbs-utils",
    # what the copy of weights is compared with
    "rsync",
    # starts nccl-tests on all nodes
    "openmpi-bin",
    # there, and switched off until a test wants them
    "network-manager", "libpam-systemd", "ufw",
)  # fmt: skip
USER = "spark"
"""Account that Ansible logs in with; it may use sudo, with its password."""

ASLEEP = (
    "NetworkManager.service",
    "NetworkManager-wait-online.service",
    "NetworkManager-dispatcher.service",
    "ufw.service",
)
"""Units of those packages that must not slow down a boot."""

REVISION = 3
"""Count this up after changing `_finish`."""


def digest() -> str:
    """Short name of the recipe: another list of packages, another digest."""
    mirror = os.environ.get("LAB_DEBIAN_MIRROR", "")
    recipe = json.dumps([SUITE, sorted(PACKAGES), USER, REVISION, mirror, os.uname().machine])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def folder(cache: Path) -> Path:
    """Where the finished tree is, or will be."""
    return cache / f"debian-{digest()}"


def build(cache: Path) -> Path:
    """The finished tree; builds it unless it is there. A tree is either complete under its name or not used at all."""
    target = folder(cache)
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    for unfinished in cache.glob("debian-*.partial"):
        shutil.rmtree(unfinished)
    partial = target.with_suffix(".partial")
    host.step(f"building the Debian tree ({SUITE}, {len(PACKAGES)} packages and what they need; about a minute)")
    _debootstrap(partial, cache / "debootstrap.log")
    _finish(partial)
    partial.rename(target)
    host.step(f"Debian tree ready: {target}")
    return target


def _debootstrap(tree: Path, log: Path) -> None:
    """Run debootstrap so that it dies with this process, in namespaces that take its mounts and children along."""
    command = [
        "setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child",
        "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(tree),
    ]  # fmt: skip
    if mirror := os.environ.get("LAB_DEBIAN_MIRROR"):
        command.append(mirror)
    spoken = time.monotonic()
    last: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            last = [*last[-5:], line.rstrip()]
            if time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                host.step(f"  debootstrap: {line.strip().removeprefix('I: ')}")
    if process.returncode != 0:
        detail = "\n  ".join(last)
        raise LabError(f"debootstrap failed (whole log: {log}):\n  {detail}")


def _finish(tree: Path) -> None:
    """Empty apt's sources, lists and cache, drop host keys, and add the user."""
    (tree / "etc/apt/sources.list").write_text("")
    for used in ("var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(tree / used)
        (tree / used).mkdir()
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    host.run(["chroot", str(tree), "useradd", "--create-home", "--shell", "/bin/bash", "--groups", "adm,sudo", USER])
    # A log-in needs no session of its own: NetworkManager's packages alone want it.
    host.run(["chroot", str(tree), "pam-auth-update", "--package", "--remove", "systemd"])
    host.run(["systemctl", f"--root={tree}", "disable", "--quiet", *ASLEEP])
