"""The process behind each running node: boots it, and boots it again when it asks for a reboot."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab import network
from lab.cgroups import Group
from lab.settings import ROOT, Node, Settings, environment

REBOOT = 133
"""Exit status of systemd-nspawn when the system inside asked for a reboot."""

BOOT = """\
cd "$LAB_FOLDER"
mount -t overlay -o "lowerdir=$LAB_LOWER,upperdir=upper,workdir=work" "$LAB_SOURCE" root
mkdir -p /run/systemd/nspawn
mount -t tmpfs "$LAB_SOURCE" /run/systemd/nspawn
exec nsenter "--net=/run/netns/$LAB_SOURCE" systemd-nspawn "$@"
"""
"""Runs in a mount namespace of its own, so that every mount ends with the node."""


def node_group(settings: Settings, node: Node) -> Group:
    return Group(f"{settings.name}/{node.name}")


def nspawn_arguments(settings: Settings, node: Node, binds: Sequence[tuple[Path, str]]) -> list[str]:
    """Arguments of systemd-nspawn. `binds` are pairs (folder here, path in the node), mounted read-only."""
    arguments = [
        "--quiet", "--boot", f"--directory={settings.node_folder(node) / 'root'}",
        f"--machine={settings.namespace(node)}", f"--hostname={node.name}",
        "--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off", "--timezone=off",
        # Enough to configure its own network and lock memory; not to load modules or set the machine's clock.
        "--capability=CAP_NET_ADMIN,CAP_IPC_LOCK", "--console=read-only",
    ]  # fmt: skip
    arguments += [f"--bind-ro={_escape(source)}:{target}" for source, target in binds]
    return arguments


def _escape(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace(":", "\\:")


def supervise(settings: Settings, node: Node, lower: Path, binds: Sequence[tuple[Path, str]]) -> None:
    """Run `node` until it powers off. Ends with the node: a power cut takes this process too."""
    group = node_group(settings, node)
    launcher, boot = group.child("launcher"), group.child("boot")
    launcher.create()
    launcher.enter()
    folder = settings.node_folder(node)
    while True:
        boot.kill()
        boot.remove()
        boot.create()
        network.plug_in(settings, node)
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "LAB_LOWER": str(lower),
            "LAB_FOLDER": str(folder),
            "LAB_SOURCE": settings.namespace(node),
            "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "yes",
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        }
        shell = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", BOOT, "boot"]
        print(f"--- {time.strftime('%H:%M:%S')} boot of {node.name}", flush=True)
        done = subprocess.run(
            [*shell, *nspawn_arguments(settings, node, binds)], env=variables, preexec_fn=boot.enter, check=False
        )
        print(f"--- {time.strftime('%H:%M:%S')} {node.name} ended with status {done.returncode}", flush=True)
        if done.returncode != REBOOT:
            break
    boot.kill()
    network.unplug(settings, node)
    if done.returncode == 0:
        mark_off(settings, node)


def mark_off(settings: Settings, node: Node) -> None:
    """Note that the node is off because somebody wanted it, not because its processes were killed."""
    (settings.node_folder(node) / "off").touch()


def spawn(settings: Settings, node: Node) -> None:
    """Start the supervising process of `node`, detached from this one."""
    folder = settings.node_folder(node)
    (folder / "off").unlink(missing_ok=True)
    with (folder / "console.log").open("a") as console:
        subprocess.Popen(
            [sys.executable, str(ROOT / "lab/lab.py"), "supervise", node.name],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, cwd="/", start_new_session=True,
            env={**os.environ, **environment(settings)},
        )  # fmt: skip
