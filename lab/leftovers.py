"""Finds and removes what a lab has in the kernel, by the lab's name alone.

Names are looked up in the kernel, never in state files: what a deleted clone or a killed build left behind is found
too, and nothing that the lab did not make is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lab import host, network
from lab.cgroups import Group
from lab.settings import INTERFACES, LabError, Settings

STATE = ("keys", "known_hosts", "ssh_config", "become_password", "vllm_env_lock", "apt")
"""What lies in the state folder beside the nodes' disks."""


def parse_mounts(mountinfo: str, settings: Settings) -> list[str]:
    """Mount points whose source is named after the lab, from the text of /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if settings.owns(after.split()[1]):
            found.append(before.split()[4].replace("\\040", " "))
    return found


def parse_socket_inodes(table: str, remote: str | None = None) -> set[str]:
    """Inodes of the sockets in a /proc/net/tcp table; with `remote`, of those connected to that IPv4 address."""
    wanted = None if remote is None else "".join(f"{int(part):02X}" for part in reversed(remote.split(".")))
    rows = [line.split() for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[9] != "0" and (wanted is None or row[2].split(":")[0] == wanted)}


def parse_links(listing: str, macs: Iterable[str]) -> list[str]:
    """Names of the interfaces with one of `macs`, from the output of `ip -json link show`."""
    return [link["ifname"] for link in json.loads(listing or "[]") if link and link.get("address") in set(macs)]


def _processes() -> list[Path]:
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return f"process {pid} ({words[:80] or 'ended'})"


def inside(namespaces: Iterable[str]) -> set[int]:
    """Processes that run in one of the named network namespaces."""
    wanted = set()
    for name in namespaces:
        with suppress(OSError):
            status = (network.NAMES / name).stat()
            wanted.add((status.st_dev, status.st_ino))
    found = set()
    for folder in _processes():
        with suppress(OSError):
            status = (folder / "ns/net").stat()
            if (status.st_dev, status.st_ino) in wanted:
                found.add(int(folder.name))
    return found


def connected(namespace: str, remote: str | None = None) -> set[int]:
    """Processes anywhere that hold a TCP socket of the named namespace, such as ssh; see `parse_socket_inodes`."""
    if not network.exists(namespace):
        return set()
    command = ["nsenter", f"--net={network.NAMES / namespace}", "cat", "/proc/self/net/tcp"]
    try:
        wanted = {f"socket:[{inode}]" for inode in parse_socket_inodes(host.run(command), remote)}
    except LabError:
        return set()
    found = set()
    for folder in _processes() if wanted else ():
        with suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) in wanted:
                        found.add(int(folder.name))
    return found


def end(pids: set[int], seconds: float = 5.0) -> None:
    """End processes and wait until they are gone."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise LabError(f"processes do not end: {sorted(pids)}")
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def hang_up(settings: Settings, address: str | None = None) -> None:
    """End the SSH clients that are connected to the lab, or to one address of it: the other end is gone."""
    end(connected(settings.lab_namespace, address) - {os.getpid()})


def mounts(settings: Settings) -> list[str]:
    return parse_mounts(Path("/proc/self/mountinfo").read_text(), settings)


def links(settings: Settings) -> list[str]:
    """Interfaces of the lab outside its namespaces (there never should be one)."""
    if shutil.which("ip") is None:
        return []
    macs = [node.mac(interface) for node in settings.nodes for interface in INTERFACES]
    return parse_links(host.run(["ip", "-json", "link", "show", "type", "veth"]), macs)


def state_files(settings: Settings) -> list[Path]:
    """What the lab has in its state folder, the marker last; nothing where the lab did not write its marker."""
    return [*_named_like_ours(settings), settings.marker] if settings.marker.is_file() else []


def _named_like_ours(settings: Settings) -> list[Path]:
    known = [settings.state / name for name in STATE]
    disks = [*settings.state.glob("spark-?"), *settings.state.glob(".spark-?.partial"), *settings.state.glob(".old-*")]
    return [path for path in [*known, *disks] if path.exists() or path.is_symlink()]


def claim_state(settings: Settings) -> None:
    """Mark the state folder as the lab's own; raises LabError if it holds files that the lab would replace."""
    if settings.marker.is_file():
        return
    if strangers := _named_like_ours(settings):
        raise LabError(
            f"{settings.state} holds {strangers[0].name} and no {settings.marker.name}, so it is not a lab's folder; "
            "set LAB_DIR to an empty one, or delete what an older lab left there"
        )
    settings.state.mkdir(parents=True, exist_ok=True)
    settings.marker.write_text("The folder of a lab: `lab.py down` deletes what the lab has in it.\n")


def find(settings: Settings) -> list[str]:
    """One line for everything that exists of the lab; empty after a complete removal."""
    return in_kernel(settings) + [f"file {path}" for path in state_files(settings)]


def in_kernel(settings: Settings) -> list[str]:
    """One line for every process, control group, namespace, mount, interface and runtime folder of the lab."""
    group = Group(settings.name)
    namespaces = network.names(settings)
    pids = group.pids() | inside(namespaces)
    for namespace in namespaces:
        pids |= connected(namespace)
    lines = [_describe(pid) for pid in sorted(pids)]
    lines += [f"control group {folder}" for folder in group.folders if folder.is_dir()]
    lines += [f"network namespace {name}" for name in namespaces]
    lines += [f"mount {place}" for place in mounts(settings)]
    lines += [f"interface {name}" for name in links(settings)]
    return lines + ([f"folder {settings.run_folder}"] if settings.run_folder.exists() else [])


def remove_kernel_objects(settings: Settings) -> None:
    """End every process of the lab; remove its control groups, namespaces, cables and mounts."""
    group = Group(settings.name)
    group.kill()
    group.remove()
    namespaces = network.names(settings)
    strangers = inside(namespaces)
    for namespace in namespaces:
        strangers |= connected(namespace)
    if os.getpid() in strangers:
        raise LabError("this command runs inside the lab's own network namespace; run it outside")
    end(strangers)
    network.remove(settings)
    for place in reversed(mounts(settings)):
        host.run(["umount", place])
    shutil.rmtree(settings.run_folder, ignore_errors=True)


def remove_state(settings: Settings) -> None:
    """Delete the lab's files; the cache stays."""
    for path in state_files(settings):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    with suppress(OSError):
        settings.state.rmdir()
