"""The machine under the lab: commands, what is missing on it, and progress lines."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.settings import ROOT, LabError

TOOLS: Mapping[str, str] = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "dpkg-deb": "dpkg",
    "gpg": "gnupg",
    "gpgconf": "gnupg",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
"""Command or file that the lab needs -> Debian package that brings it."""

_started = time.monotonic()


def step(text: str) -> None:
    """Print one progress line with the seconds since the command started."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", flush=True)


def run(command: Sequence[str], *, stdin: str | None = None) -> str:
    """Standard output of `command`; raises LabError with its error text if it fails."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError(f"'{command[0]}' is not on this machine; `lab.py build` installs what is missing") from error
    if done.returncode != 0:
        detail = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise LabError(f"`{' '.join(command)}` failed: {detail}")
    return done.stdout


def attempt(command: Sequence[str]) -> bool:
    """Whether `command` succeeded; its output is dropped."""
    return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode == 0


@contextmanager
def lock(path: Path, verb: str) -> Iterator[None]:
    """Let one command at a time in; the others wait and say for whom. The file is gone afterwards."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            step(f"waiting for {os.pread(handle, 1000, 0).decode(errors='replace') or 'another command'}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)  # its holder deleted it meanwhile
    os.truncate(handle, 0)
    os.pwrite(handle, f"`lab.py {verb}` of {ROOT} (process {os.getpid()})".encode(), 0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def missing_packages(tools: Mapping[str, str] = TOOLS) -> list[str]:
    """Debian packages, sorted, without which the lab cannot work here."""
    present = {tool: Path(tool).exists() if tool.startswith("/") else shutil.which(tool) is not None for tool in tools}
    return sorted({package for tool, package in tools.items() if not present[tool]})


def require_linux() -> None:
    """Raise LabError unless this is Linux."""
    if sys.platform != "linux":
        raise LabError(f"the lab needs Linux (namespaces, overlayfs, systemd-nspawn); this machine runs {sys.platform}")


def require_root(verb: str) -> None:
    """Raise LabError unless this process is root."""
    require_linux()
    if os.geteuid() != 0:
        again = " ".join(["sudo", sys.executable, *sys.argv])
        raise LabError(f"'{verb}' needs root, for mounts and namespaces: {again}")


def require_installable() -> list[str]:
    """Packages that are missing; raise LabError that names them if there is no apt to install them."""
    missing = missing_packages()
    if missing and shutil.which("apt-get") is None:
        raise LabError(f"missing on this machine, and there is no apt to install it: {', '.join(missing)}")
    return missing


def require_tools() -> None:
    """Install what is missing if apt is here; raise LabError that names it otherwise."""
    missing = require_installable()
    if not missing:
        return
    step(f"installing on this machine: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-q", "-o", "DPkg::Lock::Timeout=120"]
    for command in (
        ["apt-get", "update", *options],
        ["apt-get", "install", "--yes", "--no-install-recommends", *options, *missing],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 and command[1] == "install":
            raise LabError(f"`{' '.join(command)}` failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
    if still := missing_packages():
        raise LabError(f"still missing after the installation: {', '.join(still)}")
