"""Packages by apt: what is missing, what apt would do about it, and what it must never do.

apt is asked to simulate first. A plan that touches a driver or a kernel, or removes anything, is refused as a whole:
DGX OS alone may do that.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible.module_utils.sparkpair.facts import Run

QUERY = ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\n")
INSTALL = ("install", "--no-install-recommends", "--no-remove", "--allow-change-held-packages")
OPTIONS = ("-q", "-y", "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")

_ACTION = re.compile(r"^(Inst|Remv|Purg) (\S+?)(?::\w+)?(?: \[([^\]]*)\])?(?: \((\S+).*\))?(?: .*)?$")
_LOCKED = re.compile(r"Could not get lock|Unable to (acquire|lock)|is another process using it")


class AptError(ValueError):
    """apt cannot or must not do what was asked; the text says what it would do and what mends it."""


@dataclass(frozen=True)
class Installed:
    """One installed package; `held` when apt-mark holds it."""

    version: str
    held: bool


@dataclass(frozen=True)
class Action:
    """One line of a simulation: `kind` Inst, Remv or Purg; `old` and `new` versions, empty where there is none."""

    kind: str
    name: str
    old: str
    new: str

    def __str__(self) -> str:
        if self.kind == "Inst":
            return (
                f"{'upgrade' if self.old else 'install'} {self.name} {' to '.join(filter(None, (self.old, self.new)))}"
            )
        return f"remove {self.name} {self.old}".strip()


def parse_installed(text: str) -> dict[str, Installed]:
    """Output of QUERY: packages that are installed, by name."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: Installed(row[1], row[2][0] == "h") for row in rows if len(row) == 3 and row[2][1:2] == "i"}


def parse_simulation(text: str) -> list[Action]:
    """What `apt-get --simulate` would do. Raises AptError for a line of an action that cannot be read."""
    found = []
    for line in text.splitlines():
        if not line.startswith(("Inst ", "Remv ", "Purg ")):
            continue
        match = _ACTION.match(line)
        if match is None:
            raise AptError(f"found the line {line!r} in apt's simulation, expected a package with its version")
        kind, name, old, new = match.groups()
        found.append(Action(kind, name, old or "", new or ""))
    return found


def fits(name: str, globs: Iterable[str]) -> bool:
    """Whether a package's name fits one of the globs."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def refusals(actions: Sequence[Action], never: Sequence[str]) -> list[str]:
    """The actions that must not happen: whatever is removed, and whatever fits `never`."""
    return [str(action) for action in actions if action.kind != "Inst" or fits(action.name, never)]


def missing(
    pinned: Mapping[str, str], plain: Sequence[str], installed: Mapping[str, Installed]
) -> tuple[list[str], list[str]]:
    """What to install (in apt's words, name=version for pinned ones), and which pinned ones to hold."""
    wrong = {
        name: version
        for name, version in pinned.items()
        if name not in installed or not fnmatch.fnmatchcase(installed[name].version, version)
    }
    install = [f"{name}={version}" for name, version in wrong.items()]
    install += [name for name in plain if name not in installed]
    return install, [name for name in pinned if name in wrong or not installed[name].held]


def patiently(run: Run, command: Sequence[str], seconds: float, sleep: Callable[[float], None] = time.sleep) -> str:
    """Output of an apt command that may find another one at work, for at most `seconds`. Raises AptError."""
    deadline = time.monotonic() + seconds
    while True:
        status, out, err = run(list(command))
        if status == 0:
            return str(out)
        if not _LOCKED.search(err + out):
            raise AptError(" ".join((err or out).split())[-600:])
        if time.monotonic() >= deadline:
            raise AptError(
                f"found another apt at work for {seconds:.0f} s (DGX OS runs one at its first boot), expected an end: "
                f"ps -C apt-get,dpkg,unattended-upgr; then run again, or raise gpu_lock_timeout"
            )
        sleep(3)


def simulate(run: Run, packages: Sequence[str], never: Sequence[str]) -> list[Action]:
    """What an installation would do. Raises AptError when apt finds no way or the way is one that must not be."""
    status, out, err = run(["apt-get", "--simulate", *OPTIONS, *INSTALL, *packages])
    if status:
        reason = " ".join(line for line in (err + out).splitlines() if line.startswith(("E:", " ", "W:")))
        raise AptError(
            f"found no way to install {', '.join(packages)} without removing or barred packages "
            f"({' '.join((reason or err or out).split())[:500]}), expected one: apt-cache policy on the node, "
            f"gpu_packages and gpu_never in the inventory"
        )
    actions = parse_simulation(out)
    if bad := refusals(actions, never):
        raise AptError(
            f"found that apt would {', '.join(bad)}, expected no change to a driver or kernel and no removal: these "
            f"come from DGX OS alone; nothing was changed; see apt-get --simulate install {' '.join(packages)}"
        )
    return actions
