"""The lab's control groups: /LAB/NODE in every hierarchy that systemd-nspawn uses.

A control group is how the lab knows all processes of a node, and how it ends them at once. Where PID 1 is systemd
there is one hierarchy (cgroup2). Other machines may have cgroup2 beside the old name=systemd hierarchy, and
systemd-nspawn then wants its processes in both.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.settings import LabError


def parse_hierarchies(mountinfo: str) -> list[Path]:
    """Mount points of cgroup2 (first) and of name=systemd, from the text of /proc/PID/mountinfo."""
    unified: list[Path] = []
    named: list[Path] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        place, kind, options = Path(before.split()[4]), after.split()[0], after.split()[-1].split(",")
        if kind == "cgroup2":
            unified.append(place)
        elif kind == "cgroup" and "name=systemd" in options:
            named.append(place)
    return unified[:1] + named[:1]


def hierarchies() -> list[Path]:
    """Mount points in use on this machine, cgroup2 first; empty without cgroup2."""
    found = parse_hierarchies(Path("/proc/self/mountinfo").read_text())
    return found if found and (found[0] / "cgroup.procs").exists() else []


def below(folder: Path) -> list[Path]:
    """`folder` and every folder below it, the deepest first; empty if it does not exist."""
    return [Path(place) for place, _, _ in os.walk(folder, topdown=False)]


def read_pids(folder: Path) -> set[int]:
    """Process ids in the group at `folder` and in all groups below it."""
    pids: set[int] = set()
    for group in below(folder):
        with suppress(OSError):
            pids.update(int(word) for word in (group / "cgroup.procs").read_text().split())
    return pids - {0}


@dataclass(frozen=True)
class Group:
    """One control group, the same `path` (such as "sparkpair-lab/spark-a") in every hierarchy."""

    path: str

    @property
    def folders(self) -> list[Path]:
        """Where the group is or would be, cgroup2 first."""
        return [top / self.path for top in hierarchies()]

    def child(self, name: str) -> Group:
        return Group(f"{self.path}/{name}")

    def exists(self) -> bool:
        return any(folder.is_dir() for folder in self.folders)

    def pids(self) -> set[int]:
        return set().union(*(read_pids(folder) for folder in self.folders))

    def populated(self) -> bool:
        """Whether any process is in the group or below it; cheap, reads one file."""
        try:
            return "populated 1" in (self.folders[0] / "cgroup.events").read_text()
        except (OSError, IndexError):
            return False

    def create(self) -> None:
        """Make the group; hand down the controllers that its parent has (none where cgroup v1 holds them)."""
        folders = self.folders
        if not folders:
            raise LabError("no cgroup2 hierarchy is mounted on this machine (expected at /sys/fs/cgroup)")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for parent in reversed(folders[0].parents):
            if parent.is_relative_to(hierarchies()[0]):
                with suppress(OSError):
                    for controller in (parent / "cgroup.controllers").read_text().split():
                        with suppress(OSError):
                            (parent / "cgroup.subtree_control").write_text(f"+{controller}")

    def enter(self) -> None:
        """Move this process into the group."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def kill(self, seconds: float = 10.0) -> None:
        """End every process in the group at once, as a power cut would, and wait until all are gone."""
        deadline = time.monotonic() + seconds
        if not self.exists():
            return
        switch = self.folders[0] / "cgroup.kill"
        with suppress(OSError):
            switch.write_text("1")
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise LabError(f"processes in control group {self.path} do not end: {sorted(pids)}")
            if not switch.exists():
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def remove(self, seconds: float = 5.0) -> None:
        """Remove the empty group with all groups below it; raises LabError if that cannot be done."""
        deadline = time.monotonic() + seconds
        for top in self.folders:
            while top.is_dir():
                for folder in below(top):
                    with suppress(OSError):
                        folder.rmdir()
                if top.is_dir():
                    if time.monotonic() > deadline:
                        raise LabError(f"control group {top} cannot be removed; processes: {sorted(read_pids(top))}")
                    time.sleep(0.02)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Be in the group meanwhile, with all children started; then go back and end those that are left."""
        before = _own_groups()
        self.create()
        self.enter()
        try:
            yield
        finally:
            for folder in before:
                (folder / "cgroup.procs").write_text(str(os.getpid()))
            self.kill()
            self.remove()
            for folder in self.folders:
                with suppress(OSError):
                    folder.parent.rmdir()


def _own_groups() -> list[Path]:
    """The groups that this process is in, one for each hierarchy in use."""
    tops = hierarchies()
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(tops[0] / path.lstrip("/"))
        elif controllers == "name=systemd" and len(tops) > 1:
            found.append(tops[1] / path.lstrip("/"))
    return found
