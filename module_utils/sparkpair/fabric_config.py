"""Write, validate and apply the network plan of a node's rails, and take it back.

Before anything changes, the files, the kernel settings, the addresses and the MTU as they were go into a
journal. It stays until the plan is confirmed, so a plan that was applied but never proven can be taken back
byte for byte, also by a later run. Commands are run by a function that is handed in.
"""

from __future__ import annotations

import base64
import inspect
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import fabric_guard
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_guard import GuardError, Run, inside, read_live, write_atomic

ARP_SETTINGS = {"arp_ignore": "1", "arp_announce": "2"}
"""Twins share one cable: each must answer (1) and ask (2) for its own address only, or ARP mixes the rails."""

NETPLAN_FOLDERS = ("etc/netplan", "lib/netplan", "run/netplan")
"""Where netplan reads from; a plan is validated together with whatever is there."""

SETTLE_SECONDS = 15.0
"""How long addresses may take to appear after `netplan apply`; a link that bounces needs about 5 seconds."""

CONFIRM_SECONDS = 50.0
"""When an unconfirmed plan is taken back: applying and proving take 40 s at most, and 60 s are promised."""


@dataclass(frozen=True)
class Config:
    """What a node's rails shall be.

    `rails` maps each network interface to its address with prefix length. Files are absolute paths below
    `root`, which only tests change.
    """

    rails: Mapping[str, str]
    mtu: int
    netplan_file: Path
    netplan_text: str
    sysctl_file: Path
    journal: Path
    root: Path = Path("/")

    def inside(self, path: Path | str) -> Path:
        """`path` below `root`."""
        below: Path = inside(self.root, path)
        return below

    def files(self) -> dict[Path, tuple[str, int]]:
        """Content and mode of every file that is ours."""
        return {
            self.netplan_file: (self.netplan_text, 0o600),
            self.sysctl_file: (sysctl_text(self.rails), 0o644),
        }

    def settings(self) -> dict[Path, str]:
        """Kernel settings below /proc/sys: file -> value."""
        return {
            Path("/proc/sys/net/ipv4/conf") / netdev / name: value
            for netdev in self.rails
            for name, value in ARP_SETTINGS.items()
        }


@dataclass
class Change:
    """One difference between what is and what shall be, for Ansible's diff."""

    title: str
    before: str
    after: str

    def diff(self) -> dict[str, str]:
        """As Ansible prints it."""
        return {
            "before_header": self.title,
            "after_header": self.title,
            "before": self.before,
            "after": self.after,
        }


@dataclass
class Outcome:
    """What was, or would be, changed. `pending` is true while a journal waits for confirmation."""

    changes: list[Change] = field(default_factory=list)
    pending: bool = False


def sysctl_text(netdevs: Iterable[str]) -> str:
    """The file that sets `ARP_SETTINGS` for each interface at boot."""
    lines = ["# Managed by sparkpair. The twins of a cage share one cable: each answers for its own address only."]
    lines += [f"net.ipv4.conf.{netdev}.{name} = {value}" for netdev in netdevs for name, value in ARP_SETTINGS.items()]
    return "\n".join(lines) + "\n"


def live_text(mtu: int | None, addresses: Iterable[str]) -> str:
    """An interface in one line for a diff."""
    return f"mtu {mtu}, addresses {' '.join(sorted(addresses)) or 'none'}\n"


def live_changes(config: Config, run: Run) -> list[Change]:
    """Rails whose MTU or address is not as planned, whatever the files say."""
    live, changes = read_live(run), []
    for netdev, address in config.rails.items():
        mtu, addresses = live.get(netdev, (None, ()))
        if mtu != config.mtu or address not in addresses:
            after = live_text(config.mtu, {*addresses, address})
            changes.append(Change(f"interface {netdev}", live_text(mtu, addresses), after))
    return changes


def read_text(path: Path) -> str:
    """Text of a file; empty when it is absent."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def file_changes(config: Config) -> list[Change]:
    """Files whose content or mode is not as planned."""
    changes = []
    for path, (text, mode) in config.files().items():
        here = config.inside(path)
        before = read_text(here)
        found = here.stat().st_mode & 0o777 if here.is_file() else None
        if before != text or found != mode:
            title = str(path) if found in (None, mode) else f"{path} (mode {found:04o} -> {mode:04o})"
            changes.append(Change(title, before, text))
    return changes


def setting_changes(config: Config) -> list[Change]:
    """Kernel settings that are not as planned."""
    changes = []
    for path, value in config.settings().items():
        before = read_text(config.inside(path)).strip()
        if before != value:
            changes.append(Change(str(path), f"{before}\n", f"{value}\n"))
    return changes


def validate(config: Config, run: Run) -> None:
    """Let netplan read the plan together with all other plans in a scratch folder. Raises FabricError."""
    if config.netplan_file.parent != Path("/etc/netplan") or config.netplan_file.suffix != ".yaml":
        raise FabricError(f"fabric_netplan_file {config.netplan_file} is not a .yaml file in /etc/netplan")
    with tempfile.TemporaryDirectory(prefix="sparkpair-netplan-") as scratch:
        for folder in NETPLAN_FOLDERS:
            if config.inside(folder).is_dir():
                shutil.copytree(config.inside(folder), Path(scratch) / folder)
        write_atomic(Path(scratch) / str(config.netplan_file).lstrip("/"), config.netplan_text.encode(), 0o600)
        status, out, err = run(["netplan", "generate", "--root-dir", scratch])
        if status:
            raise FabricError(f"netplan refuses {config.netplan_file}: {(err or out).replace(scratch, '').strip()}")


def save(config: Config, run: Run) -> None:
    """Keep the state as it is in the journal, unless an older, unconfirmed one is there."""
    journal = config.inside(config.journal)
    if journal.is_file():
        return
    files: dict[str, dict[str, Any] | None] = {}
    for path in config.files():
        here = config.inside(path)
        files[str(path)] = None
        if here.is_file():
            content = base64.b64encode(here.read_bytes()).decode()
            files[str(path)] = {"content": content, "mode": here.stat().st_mode & 0o777}
    live = {netdev: state for netdev, state in read_live(run).items() if netdev in config.rails}
    settings = {str(path): read_text(config.inside(path)).strip() for path in config.settings()}
    journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = {"files": files, "live": live, "settings": settings}
    write_atomic(journal, json.dumps(state, indent=1).encode(), 0o600)


def set_kernel(config: Config, settings: Mapping[Path, str]) -> None:
    """Write kernel settings."""
    for path, value in settings.items():
        config.inside(path).write_text(f"{value}\n", encoding="ascii")


def apply_netplan(run: Run) -> None:
    """Make the files in /etc/netplan real. Raises FabricError."""
    status, out, err = run(["netplan", "apply"])
    if status:
        raise FabricError(f"netplan apply failed: {(err or out).strip()}")


def settle(config: Config, run: Run, seconds: float) -> None:
    """Wait until every rail has its MTU and address. Raises FabricError after `seconds`."""
    deadline = time.monotonic() + seconds
    while missing := live_changes(config, run):
        if time.monotonic() > deadline:
            what = "; ".join(f"{change.title} has {change.before.strip()}" for change in missing)
            raise FabricError(f"netplan applied the plan, but after {seconds:.0f} s {what}: see networkctl status")
        time.sleep(0.3)


def converge(config: Config, run: Run, check: bool, seconds: float = SETTLE_SECONDS) -> Outcome:
    """Make files, kernel settings and interfaces as planned; with `check` only tell what would change.

    While the plan is not confirmed, a timer takes it back after `CONFIRM_SECONDS`. Raises FabricError when
    netplan refuses the plan (nothing was touched) or when applying it fails (all is again as it was before).
    """
    changes = [*file_changes(config), *setting_changes(config), *live_changes(config, run)]
    pending = config.inside(config.journal).is_file()
    if changes:
        validate(config, run)
    if check or not (changes or pending):
        return Outcome(changes, pending)
    try:
        save(config, run)
        fabric_guard.arm(config.journal, inspect.getsource(fabric_guard), CONFIRM_SECONDS, run, config.root)
        if changes:
            for path, (text, mode) in config.files().items():
                write_atomic(config.inside(path), text.encode(), mode)
            set_kernel(config, config.settings())
            apply_netplan(run)
            settle(config, run, seconds)
    except (ValueError, OSError) as error:
        try:
            revert(config, run)
        except GuardError as again:
            raise FabricError(f"{error}; files and addresses are as before, but {again}") from error
        raise FabricError(f"{error}; the previous network is back") from error
    return Outcome(changes, pending=True)


def confirm(config: Config, run: Run) -> None:
    """The plan is proven: forget how it was before. Raises FabricError when the timer was quicker."""
    if not config.inside(config.journal).is_file():
        raise FabricError(
            f"the plan was taken back, because it was not confirmed within {CONFIRM_SECONDS:.0f} s: run again"
        )
    fabric_guard.disarm(config.journal, run, config.root)


def revert(config: Config, run: Run) -> bool:
    """Restore what the journal holds; False when there is none. Raises GuardError when netplan fails."""
    done: bool = fabric_guard.restore(config.journal, run, config.root)
    return done
