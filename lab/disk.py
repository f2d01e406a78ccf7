"""What is on a node's disk when it is fresh: the writable layer over the Debian tree, and the lab's keys."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lab import host, simulated_rdma
from lab.base import USER
from lab.settings import MANAGEMENT, ROOT, Node, Settings

ROOTFS = Path(__file__).parent / "rootfs"
"""Files that are copied into every node as they are."""

LINKS = {
    "usr/local/bin/nvidia-smi": "/usr/local/lib/lab/simulated-nvidia-smi",
    "usr/local/bin/ib_write_bw": "/usr/local/lib/lab/simulated-ib-write-bw",
    "etc/systemd/system/sysinit.target.wants/simulated-sysctl.service": "/etc/systemd/system/simulated-sysctl.service",
    # These would change sysctls of the whole machine at every boot of a node.
    "etc/sysctl.d/50-pid-max.conf": "/dev/null",
    "etc/sysctl.d/99-protect-links.conf": "/dev/null",
    **{
        f"etc/systemd/system/{unit}": "/dev/null"
        for unit in (
            "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
            "man-db.timer", "e2scrub_reap.service", "systemd-timesyncd.service", "console-getty.service",
            "getty@tty1.service",
        )
    },
}  # fmt: skip
"""Symbolic links in every node: path -> what it points to. A unit that points to /dev/null is masked."""

SYSFS = "srv/simulated-sysfs"


def netplan(node: Node) -> str:
    """The netplan file of the management interface."""
    return (
        "network:\n  version: 2\n  renderer: networkd\n  ethernets:\n"
        f"    {MANAGEMENT}: {{addresses: [{node.address}/24], link-local: []}}\n"
    )


def ssh_config(settings: Settings, python: str) -> str:
    """Text of the SSH client configuration that reaches the nodes by name or address, from any directory."""
    proxy = shlex.join([python, "-IS", str(ROOT / "lab/ssh_proxy.py"), settings.lab_namespace])
    lines = []
    for node in settings.nodes:
        lines += [f"Host {node.name} {node.address}", f"  HostName {node.address}"]
    options = {
        "User": USER,
        "IdentityFile": _quote(settings.state / "keys/id"),
        "IdentitiesOnly": "yes",
        "PreferredAuthentications": "publickey",
        "UserKnownHostsFile": _quote(settings.state / "known_hosts"),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "ProxyCommand": f"{proxy} %h %p",
        "ProxyUseFdpass": "yes",
        "ControlPath": f"{settings.run_folder}/ssh/%C",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    lines += ["Host *", *(f"  {key} {value}" for key, value in options.items())]
    return "\n".join(lines) + "\n"


def _quote(path: Path) -> str:
    return f'"{path}"'


def write_shared_state(settings: Settings) -> None:
    """Make what all nodes share and a reset keeps: keys, known hosts, SSH configuration, become password."""
    keys = settings.state / "keys"
    keys.mkdir(parents=True, exist_ok=True)
    keys.chmod(0o700)
    for name in ("id", *(node.name for node in settings.nodes)):
        if not (keys / f"{name}.pub").exists():
            (keys / name).unlink(missing_ok=True)
            host.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab-{name}", "-f", str(keys / name)])
    known = []
    for node in settings.nodes:
        kind, key = (keys / f"{node.name}.pub").read_text().split()[:2]
        known.append(f"{node.address},{node.name} {kind} {key}\n")
    write(settings.state / "known_hosts", "".join(known))
    password = settings.state / "become_password"
    if not password.exists():
        write(password, secrets.token_urlsafe(12) + "\n", 0o600)
    # The system's Python outlives the virtual environment that may be running this.
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    write(settings.state / "ssh_config", ssh_config(settings, python))


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path`, never readable by others in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    path.chmod(mode)


def password_hash(base: Path, password: str) -> str:
    """`password` hashed as in /etc/shadow, by the tree's own Python (3.11, which still has crypt)."""
    program = "import crypt, sys; print(crypt.crypt(sys.stdin.read(), crypt.mksalt(crypt.METHOD_SHA512)))"
    return host.run(["chroot", str(base), "python3", "-W", "ignore", "-c", program], stdin=password).strip()


def set_password(shadow: str, user: str, hashed: str) -> str:
    """`shadow` (text of /etc/shadow) with the password field of `user` replaced."""
    lines = []
    for line in shadow.splitlines():
        fields = line.split(":")
        if fields[0] == user:
            fields[1] = hashed
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def write_fresh(settings: Settings, node: Node, base: Path, hashed_password: str) -> None:
    """Write the disk of `node`; complete or absent under its name."""
    folder = settings.node_folder(node)
    partial = folder.with_name(f".{node.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    upper = partial / "upper"
    for name in ("work", "root"):
        (partial / name).mkdir(parents=True)
    shutil.copytree(ROOTFS, upper, symlinks=True, copy_function=_copy)
    for path in [upper, *upper.rglob("*/")]:
        path.chmod(0o755)
    for name, target in LINKS.items():
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).symlink_to(target)
    write(upper / "etc/hostname", f"{node.name}\n")
    write(upper / "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n::1 localhost ip6-localhost\n")
    write(upper / "etc/resolv.conf", "")
    write(upper / "etc/machine-id", hashlib.md5(settings.namespace(node).encode()).hexdigest() + "\n")
    write(upper / "etc/netplan/01-management.yaml", netplan(node), 0o600)
    write(upper / "etc/shadow", set_password((base / "etc/shadow").read_text(), USER, hashed_password), 0o640)
    shutil.copy2(settings.state / "keys" / node.name, upper / "etc/ssh/ssh_host_ed25519_key")
    shutil.copy2(settings.state / "keys" / f"{node.name}.pub", upper / "etc/ssh/ssh_host_ed25519_key.pub")
    _write_home(upper / f"home/{USER}", base / f"home/{USER}", (settings.state / "keys/id.pub").read_text())
    shadow = (base / "etc/shadow").stat()
    os.chown(upper / "etc/shadow", shadow.st_uid, shadow.st_gid)
    (upper / "srv").mkdir(exist_ok=True)
    simulated_rdma.write_tree(upper / SYSFS, node.index, "ring" if settings.ring else "p0")
    partial.rename(folder)


def _copy(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    Path(target).chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _write_home(home: Path, original: Path, authorized: str) -> None:
    """Write the user's home folder with the lab's key, owned as in the Debian tree."""
    owner = original.stat()
    write(home / ".ssh/authorized_keys", authorized, 0o600)
    for path, mode in ((home, 0o750), (home / ".ssh", 0o700), (home / ".ssh/authorized_keys", 0o600)):
        path.chmod(mode)
        os.chown(path, owner.st_uid, owner.st_gid)


def delete(folders: Sequence[Path]) -> None:
    """Delete node folders; fine if they do not exist."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
