"""Download the wheels of a lock with pip, whatever Python and platform runs this; for a node and for the lab alike.

Standard library only and nothing of Ansible. pip keeps nothing of a call that broke off, so the wheels come in batches:
a batch that is complete stays, and is the progress that is told.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .env_lock import Lock, Requirement

BATCH = 20
"""Wheels in one call of pip."""

RETRIES = 2
"""Further attempts at a batch that broke off."""


class WheelError(Exception):
    """The wheels cannot be had; the text says why and what to do."""


class NotOnIndexError(WheelError):
    """The index answers, but does not have a wheel."""


def lacking(requirements: Iterable[Requirement], hashes: Mapping[str, str]) -> list[Requirement]:
    """Return the requirements of which no wheel is among ``hashes`` (file name to sha256)."""
    present = set(hashes.values())
    return [r for r in requirements if not present.intersection(r.hashes)]


def strangers(requirements: Iterable[Requirement], hashes: Mapping[str, str]) -> list[str]:
    """Return the names of files whose sha256 no requirement has: damaged, or of another lock."""
    locked = {digest for r in requirements for digest in r.hashes}
    return sorted(name for name, digest in hashes.items() if digest not in locked)


def download(
    pip: list[str], requirements: list[Requirement], lock: Lock, folder: Path, say: Callable[[str], None]
) -> None:
    """Download one wheel for each requirement into ``folder``, for the lock's Python and platform.

    ``pip`` is the command that is pip. Raises WheelError.
    """
    listing = folder / "requirements.txt"
    command = [
        *pip, "download", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--progress-bar=off", "--disable-pip-version-check", "--no-input", "--implementation=cp",
        f"--python-version={lock.python}", *(f"--platform={tag}" for tag in platform_tags(lock)),
        f"--dest={folder}", f"--requirement={listing}",
    ]  # fmt: skip
    begun = time.monotonic()
    for start in range(0, len(requirements), BATCH):
        batch = requirements[start : start + BATCH]
        listing.write_text("".join(f"{r.line()}\n" for r in batch), encoding="ascii")
        _download(command, say)
        size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
        say(
            f"{start + len(batch)} of {len(requirements)} wheels, {size / 1e9:.2f} of {lock.download / 1e9:.2f} GB "
            f"after {time.monotonic() - begun:.0f} s"
        )
    listing.unlink(missing_ok=True)


def _download(command: list[str], say: Callable[[str], None]) -> None:
    """Run one batch, again when it broke off."""
    for attempt in range(RETRIES + 1):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode == 0:
            return
        lines = done.stdout.splitlines()
        if any("No matching distribution found" in line for line in lines):
            raise NotOnIndexError(f"not on the index that pip uses: {lines[-1]}")
        if "No space left on device" in done.stdout:
            raise WheelError("the disk is full; free space and run again, what was in use is untouched")
        say(f"the download broke off (attempt {attempt + 1} of {RETRIES + 1})")
    reasons = "\n".join(line for line in lines if line.startswith("ERROR")) or "\n".join(lines[-5:])
    raise WheelError(f"pip could not download the wheels of the lock; mend this and run again:\n{reasons}")


def platform_tags(lock: Lock) -> list[str]:
    """Return the wheel platform tags that a machine of the lock's kind can run, for pip's ``--platform``."""
    machine, (major, minor) = lock.machine, lock.glibc
    modern = [f"manylinux_{major}_{n}_{machine}" for n in range(minor, 4, -1)]
    return [*modern, *(f"manylinux{y}_{machine}" for y in ("2014", "2010", "1")), f"linux_{machine}"]
