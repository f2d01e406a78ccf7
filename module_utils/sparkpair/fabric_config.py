"""Write, validate and apply the network plan of a node's rails, and take it back.

Before anything changes, the state as it was goes into a journal, which stays until the plan is confirmed. With
the first confirmation it becomes the origin: what the node was like before us, kept until `absent` restores it.
Commands are run by a function that is handed in.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import inspect
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import fabric_guard
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_files import FIREWALL_UNIT, find_block, with_block
from ansible.module_utils.sparkpair.fabric_guard import GuardError, Run, inside, must, read_live, write_atomic
from ansible.module_utils.sparkpair.fabric_managers import NETPLAN_FOLDERS, profile_file
from ansible.module_utils.sparkpair.fabric_wanted import (
    HOSTS,
    UNIT_FILE,
    Change,
    Config,
    Content,
    Wanted,
    examine,
    file_changes,
    kept,
    live_changes,
    mode_of,
    read_json,
    read_text,
    ufw_unmet,
)
from ansible.module_utils.sparkpair.plan import check_mtu

SETTLE_SECONDS = 15.0
"""How long addresses may take to appear after `netplan apply`; a link that bounces needs about 5 seconds."""


BUSY = (
    "another run of the fabric stage is at work on this node, or was cut off and its plan is not taken back yet: "
    "wait a minute and run again"
)


@contextmanager
def alone(config: Config, run: Run) -> Iterator[None]:
    """Hold this node for one task of one run. Raises FabricError while another run holds it or waits to confirm."""
    folder = os.open(config.inside("/etc/netplan"), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        journal = read_json(config.inside(config.journal))
        if journal and journal.get("run") != config.run and fabric_guard.armed(run):
            raise FabricError(BUSY)
        yield
    except BlockingIOError as error:
        raise FabricError(BUSY) from error
    finally:
        os.close(folder)


@dataclass
class Outcome:
    """What was, or would be, changed. `pending` is true while a journal waits for confirmation.

    `said` are sentences that the owner must read, such as a profile that was taken over.
    """

    changes: list[Change] = field(default_factory=list)
    pending: bool = False
    said: list[str] = field(default_factory=list)


def validate(config: Config, files: Mapping[Path, Content], run: Run) -> None:
    """Let netplan read the plan together with all other plans in a scratch folder. Raises FabricError."""
    if config.netplan_file.parent != Path("/etc/netplan") or config.netplan_file.suffix != ".yaml":
        raise FabricError(f"fabric_netplan_file {config.netplan_file} is not a .yaml file in /etc/netplan")
    with tempfile.TemporaryDirectory(prefix="sparkpair-netplan-") as scratch:
        for folder in NETPLAN_FOLDERS:
            if config.inside(folder).is_dir():
                shutil.copytree(config.inside(folder), Path(scratch) / folder)
        for path, content in files.items():
            if path.parent == Path("/etc/netplan"):
                here = inside(Path(scratch), path)
                here.unlink(missing_ok=True)
                if content:
                    write_atomic(here, *content)
        status, out, err = run(["netplan", "generate", "--root-dir", scratch])
        if status:
            raise FabricError(f"netplan refuses {config.netplan_file}: {(err or out).replace(scratch, '').strip()}")


def undo_commands(config: Config, wanted: Wanted) -> tuple[list[list[str]], list[list[str]]]:
    """What takes back the rest: commands before the files are restored, and after."""
    before: list[list[str]] = []
    after: list[list[str]] = []
    if UNIT_FILE in wanted.files:
        after.append(["systemctl", "daemon-reload"])
        if config.inside(UNIT_FILE).is_file():
            after.append(["systemctl", "restart", FIREWALL_UNIT])
        else:
            before.append(["systemctl", "disable", "--quiet", "--now", FIREWALL_UNIT])
    after += [["ufw", "delete", "allow", "in", "on", netdev] for netdev in wanted.ufw]
    if wanted.profiles:
        after.append(["nmcli", "connection", "reload"])
        # NetworkManager makes profiles that no file keeps by itself, and they wait long for DHCP.
        lasting = [p for p in wanted.profiles if p.device and profile_file(p, config.root)]
        after += [["nmcli", "--wait", "10", "connection", "up", profile.uuid] for profile in lasting]
    return before, after


def save(config: Config, wanted: Wanted, run: Run) -> None:
    """Keep the state as it is in the journal. A journal that outlived its guard holds an older state, which stays."""
    journal = config.inside(config.journal)
    before, after = undo_commands(config, wanted)
    state = read_json(journal) or {
        "files": {str(path): kept(config, path) for path in wanted.files},
        "live": {netdev: state for netdev, state in read_live(run).items() if netdev in config.addresses},
        "settings": {str(path): read_text(config.inside(path)).strip() for path in config.settings()},
        "before": before,
        "after": after,
    }
    journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(journal, json.dumps({**state, "run": config.run}, indent=1).encode(), 0o600)


def apply(config: Config, wanted: Wanted, run: Run, seconds: float) -> None:
    """Make everything as planned and wait until the rails have their addresses. Raises FabricError or GuardError."""
    if wanted.files.get(UNIT_FILE, ()) is None and config.inside(UNIT_FILE).is_file():
        run(["systemctl", "disable", "--quiet", "--now", FIREWALL_UNIT])
    for path, content in wanted.files.items():
        if content is None:
            config.inside(path).unlink(missing_ok=True)
        elif (
            config.inside(path).read_bytes() if config.inside(path).is_file() else None,
            mode_of(config.inside(path)),
        ) != content:
            write_atomic(config.inside(path), *content)
    for setting, value in config.settings().items():
        config.inside(setting).write_text(f"{value}\n", encoding="ascii")
    for profile in wanted.profiles:
        run(["nmcli", "connection", "down", profile.uuid])
    if wanted.profiles:
        run(["nmcli", "connection", "reload"])
    if wanted.firewall:
        must(run, "systemctl", "daemon-reload")
        must(run, "systemctl", "enable", "--quiet", FIREWALL_UNIT)
        must(run, "systemctl", "restart", FIREWALL_UNIT)
    for netdev in wanted.ufw:
        must(run, "ufw", "allow", "in", "on", netdev)
    status, out, err = run(["netplan", "apply"])
    if status:
        raise FabricError(f"netplan apply failed: {(err or out).strip()}")
    settle(config, run, seconds)


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

    While the plan is not confirmed, a timer takes it back after `confirm_seconds`. Raises FabricError when
    netplan refuses the plan (nothing was touched) or when applying it fails (all is again as it was before).
    """
    wanted = examine(config, run)
    pending = config.inside(config.journal).is_file()
    said = [
        f"the NetworkManager profile {profile.name!r} on {profile.device or profile.bound} is taken over; "
        f"fabric_state=absent brings it back from {config.origin}"
        for profile in wanted.profiles
        if profile_file(profile, config.root)
    ]
    said += [
        f"ufw is active and has no rule for {address}, from where a rank of the ring comes: ufw allow from {address}"
        for address in ufw_unmet(config)
    ]
    if wanted.changes:
        validate(config, wanted.files, run)
    if check or not (wanted.changes or pending):
        return Outcome(wanted.changes, pending, said)
    try:
        save(config, wanted, run)
        fabric_guard.arm(config.journal, inspect.getsource(fabric_guard), config.confirm_seconds, run, config.root)
        if wanted.changes:
            apply(config, wanted, run, seconds)
    except (ValueError, OSError) as error:
        try:
            revert(config, run)
        except GuardError as again:
            raise FabricError(f"{error}; files and addresses are as before, but {again}") from error
        raise FabricError(f"{error}; the previous network is back") from error
    return Outcome(wanted.changes, pending=True, said=said)


def fingerprint(path: Path, data: bytes) -> str:
    """sha256 of what is ours in a file: all of it, or the block in /etc/hosts."""
    ours = find_block(data.decode("utf-8", "surrogateescape")).encode() if path == HOSTS else data
    return hashlib.sha256(ours).hexdigest()


def confirm(config: Config, run: Run) -> None:
    """The plan is proven: keep the state before us for `absent`, forget the one before this plan.

    Raises FabricError when the timer was quicker.
    """
    journal = read_json(config.inside(config.journal))
    if not journal or journal["run"] != config.run:
        raise FabricError(
            f"the plan was taken back, because it was not confirmed within {config.confirm_seconds} s: run again"
        )
    origin = read_json(config.inside(config.origin))
    merged = {"before": journal["before"], **origin}
    for part in ("files", "settings", "live"):
        merged[part] = {**journal[part], **origin.get(part, {})}
    # Units are undone as the oldest state says; rules and profiles of later runs come on top.
    later = [command for command in journal["after"] if not origin or command[0] != "systemctl"]
    merged["after"] = [*origin.get("after", []), *(c for c in later if c not in origin.get("after", []))]
    written = {str(path): fingerprint(path, content[0]) for path, content in config.files().items() if content}
    merged["ours"] = {**dict.fromkeys(merged["files"], ""), **written}
    write_atomic(config.inside(config.origin), json.dumps(merged, indent=1).encode(), 0o600)
    fabric_guard.disarm(config.journal, run, config.root)


def revert(config: Config, run: Run) -> bool:
    """Restore what the journal of this run holds; False when there is none. Raises GuardError when netplan fails."""
    journal = read_json(config.inside(config.journal))
    if not journal or journal["run"] != config.run:
        return False
    done: bool = fabric_guard.restore(config.journal, run, config.root)
    return done


def remove(journal: Path, run: Run, check: bool, root: Path = Path("/")) -> list[Change]:
    """Restore the node as it was before us, byte for byte; returns what changes. Safe to run again.

    Raises FabricError when somebody edited a file of ours since, and GuardError when a command fails.
    """
    bare = Config(rails=(), mtu=0, netplan_file=Path("/"), netplan_text="", journal=journal, root=root)
    if not check:
        fabric_guard.restore(journal, run, root)
    origin = read_json(inside(root, bare.origin))
    if not origin:
        return []
    refuse_edited(bare, origin)
    hosts = origin["files"].get(str(HOSTS))
    if hosts:
        rest = with_block(read_text(inside(root, HOSTS)), "").encode("utf-8", "surrogateescape")
        before = base64.b64decode(hosts["content"])
        # Others may have written to /etc/hosts since: our block alone goes.
        if rest.rstrip(b"\n") != before.rstrip(b"\n"):
            hosts["content"] = base64.b64encode(rest).decode()
    files: dict[Path, Content] = {
        Path(path): (base64.b64decode(old["content"]), old["mode"]) if old else None
        for path, old in origin["files"].items()
    }
    changes: list[Change] = file_changes(bare, files)
    if not check:
        fabric_guard.restore_state(origin, run, root)
        inside(root, bare.origin).unlink()
        fabric_guard.tidy(inside(root, journal).parent)
    return changes


def refuse_edited(config: Config, origin: Mapping[str, Any]) -> None:
    """Raise FabricError that names every file of ours that is neither as we wrote it nor as it was before us."""
    edited = []
    for path, digest in origin["ours"].items():
        here = config.inside(path)
        now = fingerprint(Path(path), here.read_bytes()) if here.is_file() else ""
        if now != digest and kept(config, path) != origin["files"].get(path):
            edited.append(path)
    if edited:
        raise FabricError(
            f"{' and '.join(edited)} was edited since sparkpair wrote it: keep a copy of what you need, run "
            "playbooks/fabric.yml, which writes our version again, then fabric_state=absent once more"
        )


def run_task(params: Mapping[str, Any], run: Run, check: bool) -> tuple[dict[str, Any], list[str]]:
    """What the `fabric_config` module does for its arguments: its result, and sentences for the owner.

    Raises ValueError (FabricError, PlanError or GuardError).
    """
    journal, state = Path(params["journal"]), params["state"]
    if state == "absent":
        with alone(Config((), 0, Path("/"), "", journal), run):
            return listed(remove(journal, run, check), False), []
    config = Config(
        run=secrets.token_hex(8) if state == "present" else params["run"],
        mtu=check_mtu(params["mtu"]),
        netplan_file=Path(params["netplan_file"]),
        netplan_text=params["netplan"],
        journal=journal,
        confirm_seconds=params["confirm_seconds"],
        **{name: params[name] for name in ("rails", "rank", "names", "ports", "meeting")},
    )
    if not all(config.meeting):
        raise FabricError("a ring is configured as a whole, because its nodes let each other in: run without --limit")
    if state == "present":
        with nullcontext() if check else alone(config, run):
            outcome = converge(config, run, check)
        return {**listed(outcome.changes, outcome.pending), "run": config.run}, outcome.said
    if state == "reverted":
        return {"changed": not check and revert(config, run), "pending": False}, []
    if not check:
        confirm(config, run)
    return {"changed": False, "pending": False}, []


def listed(changes: list[Change], pending: bool) -> dict[str, Any]:
    """Changes as Ansible shows them."""
    return {
        "changed": bool(changes),
        "pending": pending,
        "changes": [change.title for change in changes],
        "diff": [change.diff() for change in changes],
    }
