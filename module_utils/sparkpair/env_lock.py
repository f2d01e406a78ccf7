"""Hash locks: the exact list of wheels of one environment, and the digest that names the environment.

A lock is a pip requirements file of pinned and hashed lines under one machine-readable first line::

    # sparkpair-lock vllm=0.33.0 python=3.12 platform=aarch64-manylinux_2_39 download=5123456789
    aiohttp==3.14.5 \\
        --hash=sha256:<64 hex digits>

``download`` is the size in bytes of all wheels. Nothing else is allowed in the file: no index, no option, no
marker, no extra. Such a lock needs no resolution, so what was locked is what is installed, or nothing is.
Standard library only; also used by ``locks/lock.py`` and ``lab/wheelhouse.py`` outside Ansible.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_HEADER = re.compile(
    r"# sparkpair-lock vllm=(\S+) python=(\d+\.\d+) platform=(\w+?)-manylinux_(\d+)_(\d+) download=(\d+)$"
)
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!-]*)((?: --hash=sha256:[0-9a-f]{64})+)$"
)


class LockError(ValueError):
    """The lock is not one that can be installed exactly; the text says what to mend."""


@dataclass(frozen=True)
class Requirement:
    """One pinned distribution; ``hashes`` are the sha256 digests (hex) of wheels that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def line(self) -> str:
        """Return the requirement as it stands in a lock."""
        hashes = (f"--hash=sha256:{digest}" for digest in self.hashes)
        return " \\\n    ".join([f"{self.name}=={self.version}", *hashes])


@dataclass(frozen=True)
class Lock:
    """A parsed lock: what it is for, and its requirements in the order of the file."""

    vllm: str
    python: str
    machine: str
    glibc: tuple[int, int]
    download: int
    requirements: tuple[Requirement, ...]

    def header(self) -> str:
        """Return the machine-readable first line."""
        platform = f"{self.machine}-manylinux_{self.glibc[0]}_{self.glibc[1]}"
        facts = f"vllm={self.vllm} python={self.python} platform={platform} download={self.download}"
        return f"# sparkpair-lock {facts}"

    def version_of(self, name: str) -> str | None:
        """Return the locked version of a distribution, None when it is not in the lock."""
        return next((r.version for r in self.requirements if r.name == normalize(name)), None)


def normalize(name: str) -> str:
    """Return a distribution name in its canonical spelling (lower case, runs of ``-_.`` as one dash)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Parse the requirement lines of a lock; comments are skipped.

    Raises:
        LockError: a requirement without pin or hash, an option line, a name given twice, no requirement, or a comment
            with a backslash.
    """
    if comment := re.search(r"^[^\S\n]*#.*\\.*$", text, re.MULTILINE):
        raise LockError(f"a comment has a backslash, which could hide the next line: {comment[0].strip()[:120]!r}")
    requirements: dict[str, Requirement] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _REQUIREMENT.match(re.sub(r"\s+", " ", line.strip()))
        if not match:
            raise LockError(f"not a pinned requirement with sha256 hashes: {line.strip()[:120]!r}")
        name = normalize(match[1])
        if name in requirements:
            raise LockError(f"{name} is locked twice")
        requirements[name] = Requirement(name, match[2], tuple(re.findall(r"[0-9a-f]{64}", match[3])))
    if not requirements:
        raise LockError("the lock has no requirement")
    return tuple(requirements.values())


def parse_lock(text: str) -> Lock:
    """Parse a lock.

    Raises:
        LockError: no valid first line, or requirements that are not a lock (see ``parse_requirements``).
    """
    first, _, rest = text.partition("\n")
    header = _HEADER.match(first.strip())
    if not header:
        wanted = "# sparkpair-lock vllm=... python=... platform=... download=..."
        raise LockError(f"the first line is not {wanted!r} but {first.strip()[:120]!r}")
    vllm, python, machine, major, minor, download = header.groups()
    return Lock(vllm, python, machine, (int(major), int(minor)), int(download), parse_requirements(rest))


def render_lock(lock: Lock, notes: str) -> str:
    """Return the text of a lock; ``notes`` become comment lines under the first line."""
    comments = [f"# {line}".rstrip() for line in notes.splitlines()]
    return "\n".join([lock.header(), *comments, *(r.line() for r in lock.requirements)]) + "\n"


def env_digest(lock_text: str, python: str, machine: str) -> str:
    """Return the environment's name: 16 hex digits of the sha256 over lock, Python minor version and machine.

    Python's patch level is left out: it changes with security updates and the environment survives those.
    """
    return hashlib.sha256("\0".join([lock_text, python, machine]).encode()).hexdigest()[:16]
