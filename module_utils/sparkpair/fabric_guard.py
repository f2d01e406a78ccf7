"""Take back a network plan that nobody confirmed.

Standard library only and nothing of Ansible, because this file also runs alone: while a plan waits for its
confirmation a copy lies on the node, started by a timer, and by a unit after a reboot. So a cut controller, a
crashed run or a reset in between ends with the network as it was.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a command; returns its exit status, output and error output."""

Live = dict[str, tuple[int, tuple[str, ...]]]
"""MTU and IPv4 addresses with prefix length of each interface."""

SERVICE = "sparkpair-fabric-guard.service"
TIMER = "sparkpair-fabric-guard.timer"
UNIT_FILE = Path("/etc/systemd/system") / SERVICE

UNIT = """\
[Unit]
Description=Take back a fabric plan that nobody confirmed
ConditionPathExists={journal}
After=systemd-networkd.service NetworkManager.service

[Service]
Type=oneshot
ExecStart=/usr/bin/python3 {program} {journal}

[Install]
WantedBy=multi-user.target
"""


class GuardError(ValueError):
    """The network could not be armed or restored in full; the text says what is left."""


def must(run: Run, *command: str) -> str:
    """Run a command and return its output. Raises GuardError when it fails."""
    status, out, err = run(list(command))
    if status:
        raise GuardError(f"{' '.join(command)} failed: {(err or out).strip()}")
    return out


def ipv4_addresses(link: Mapping[str, Any]) -> tuple[str, ...]:
    """IPv4 addresses with prefix length from one entry of `ip -j addr`."""
    return tuple(
        f"{info['local']}/{info['prefixlen']}"
        for info in link.get("addr_info", [])
        if info.get("family") == "inet" and "local" in info
    )


def read_live(run: Run) -> Live:
    """MTU and addresses of every interface. Raises GuardError."""
    links = json.loads(must(run, "ip", "-j", "addr"))
    return {link["ifname"]: (int(link["mtu"]), ipv4_addresses(link)) for link in links if link}


def write_atomic(path: Path, data: bytes, mode: int) -> None:
    """Replace a file in one step; readers see the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def inside(root: Path, path: Path | str) -> Path:
    """`path` below `root`, which only tests change from "/"."""
    return root / str(path).lstrip("/")


def tidy(folder: Path) -> None:
    """Remove a folder when it is empty, and then ours above it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        if folder.parent.name == "sparkpair":
            tidy(folder.parent)


def arm(journal: Path, source: str, seconds: float, run: Run, root: Path = Path("/")) -> None:
    """Restore the journal in `seconds`, or after the next boot, unless `disarm` comes first. Raises GuardError.

    `source` is the text of this file. An earlier timer is replaced.
    """
    program = journal.with_name("guard.py")
    write_atomic(inside(root, program), source.encode(), 0o600)
    unit = UNIT.format(journal=journal, program=program)
    write_atomic(inside(root, UNIT_FILE), unit.encode(), 0o644)
    run(["systemctl", "stop", TIMER])
    must(run, "systemctl", "enable", "--quiet", SERVICE)
    # Without an accuracy of its own a timer may fire up to a minute late.
    when = (f"--on-active={seconds:.0f}", "--timer-property=AccuracySec=1s")
    must(run, "systemd-run", "--quiet", "--collect", *when, f"--unit={SERVICE}")


def armed(run: Run) -> bool:
    """Whether a plan waits for its confirmation, or is being taken back right now."""
    states = run(["systemctl", "is-active", TIMER, SERVICE])[1].split()
    return "active" in states or "activating" in states


def disarm(journal: Path, run: Run, root: Path = Path("/")) -> None:
    """Forget the journal and remove timer, unit and program."""
    inside(root, journal).unlink(missing_ok=True)
    if inside(root, UNIT_FILE).exists():
        run(["systemctl", "stop", TIMER])
        run(["systemctl", "disable", "--quiet", SERVICE])
        inside(root, UNIT_FILE).unlink(missing_ok=True)
        run(["systemctl", "daemon-reload"])
    inside(root, journal.with_name("guard.py")).unlink(missing_ok=True)
    tidy(inside(root, journal).parent)


def restore_live(before: Live, run: Run) -> None:
    """Give interfaces the MTU and addresses of `before`; netplan leaves them where no plan names an interface."""
    live = read_live(run)
    for netdev, (mtu, addresses) in before.items():
        now_mtu, now_addresses = live.get(netdev, (mtu, tuple(addresses)))
        for address in set(now_addresses) - set(addresses):
            run(["ip", "address", "delete", address, "dev", netdev])
        for address in set(addresses) - set(now_addresses):
            run(["ip", "address", "add", address, "dev", netdev])
        if now_mtu != mtu:
            run(["ip", "link", "set", "dev", netdev, "mtu", str(mtu)])


def restore(journal: Path, run: Run, root: Path = Path("/")) -> bool:
    """Restore the state that the journal holds; False when there is none. Raises GuardError."""
    here = inside(root, journal)
    if not here.is_file():
        disarm(journal, run, root)
        return False
    try:
        restore_state(json.loads(here.read_text(encoding="utf-8")), run, root)
    finally:
        disarm(journal, run, root)
    return True


def restore_files(files: Mapping[str, Mapping[str, Any] | None], root: Path) -> None:
    """Write files as they were, byte for byte; remove those that were not there."""
    for path, kept in files.items():
        here = inside(root, path)
        if kept:
            write_atomic(here, base64.b64decode(str(kept["content"])), int(kept["mode"]))
        else:
            here.unlink(missing_ok=True)
            if here.parent.name == "sparkpair":
                tidy(here.parent)


def restore_state(state: Mapping[str, Any], run: Run, root: Path) -> None:
    """Restore files, kernel settings, addresses and MTU, and run the commands that undo the rest.

    `state` holds `files`, `settings`, `live`, and lists of commands `before` and `after`. A command that fails
    stops nothing: GuardError with all failures comes at the end, but for those of `before`.
    """
    failed = []

    def attempt(*command: str) -> None:
        status, out, err = run(list(command))
        if status:
            failed.append(f"{' '.join(command)} failed: {(err or out).strip()}")

    for command in state.get("before", []):
        run(list(command))  # fails where the plan was taken back before its unit was written
    restore_files(state["files"], root)
    for path, value in state["settings"].items():
        if value and inside(root, path).exists():
            inside(root, path).write_text(f"{value}\n", encoding="ascii")
    attempt("netplan", "apply")
    restore_live(state["live"], run)
    for command in state.get("after", []):
        attempt(*command)
    if failed:
        raise GuardError("; ".join(failed))


def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a command without a shell."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


if __name__ == "__main__":
    restored = restore(Path(sys.argv[1]), run_command)
    print("the fabric plan was not confirmed: the previous network is back" if restored else "nothing to restore")
