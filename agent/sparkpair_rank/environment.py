"""The files of an environment: what the installation put there, and whether it still is.

The installation lists every file with its size, its time, its inode and its sha256. Looking again costs one `stat` a
file; only what differs in those is read. Left out: bytecode, which Python checks against its source, and what the
hotfix adds, which the digest of the scheduler covers.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "sparkpair-env.json"
FILES = "sparkpair-files.txt"

LATER = re.compile(
    r"sparkpair-(env\.json|files\.txt)|hotfix-proof-[0-9a-f]+\.json"
    r"|lib/[^/]+/site-packages/vllm/v1/core/sched/(dspark_prefill\.py|scheduler\.py\.[0-9a-f]+\.orig|\.dspark-[^/]*)"
)
"""Paths that come after the installation: its own records, the hotfix's module, backup, proofs and unfinished files."""

SHOWN = 3
"""Differences that are named; the others are counted."""


@dataclass(frozen=True)
class Known:
    """A file as it was installed: `size mtime_ns inode` and the sha256 of its content, or of a symlink's target."""

    identity: str
    sha256: str
    path: str


def walk(env: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below `env` with its state, folders in the order of their names."""
    stack = [("", str(env))]
    while stack:
        below, folder = stack.pop()
        if below and not below.endswith("/"):
            if not LATER.fullmatch(below):
                yield below, os.lstat(folder)
            continue
        with os.scandir(folder) as found:
            entries = [(e.name, e.path, e.is_dir(follow_symlinks=False)) for e in found if e.name != "__pycache__"]
        for name, path, is_folder in sorted(entries, reverse=True):
            stack.append((f"{below}{name}/" if is_folder else f"{below}{name}", path))


def identity(state: os.stat_result) -> str:
    """What of a file's state changes when somebody writes or replaces it."""
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"


def hash_of(path: Path) -> str:
    """The sha256 of a file's content, or of where a symlink points."""
    if path.is_symlink():
        return hashlib.sha256(bytes(path.readlink())).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(env: Path) -> tuple[int, str]:
    """Write the list of all files. Returns their number and a digest of names and contents, equal on equal nodes."""
    found = list(walk(env))
    content = hashlib.sha256()
    with (
        concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
        (env / FILES).open("w", encoding="utf-8") as listing,
    ):
        hashes = pool.map(lambda entry: hash_of(env / entry[0]), found)
        for (path, state), digest in zip(found, hashes, strict=True):
            content.update(f"{path}\0{digest}\n".encode())
            listing.write(f"{identity(state)} {digest} {path}\n")
    return len(found), content.hexdigest()[:16]


def read_record(env: Path) -> Iterator[Known]:
    """The list that `record` wrote. Raises OSError and ValueError."""
    with (env / FILES).open(encoding="utf-8") as listing:
        for line in listing:
            size, modified, inode, digest, path = line.rstrip("\n").split(" ", 4)
            yield Known(f"{size} {modified} {inode}", digest, path)


def differences(env: Path) -> Iterator[tuple[str, str]]:
    """What differs from the installation, as ("added" | "missing" | "changed", path); raises OSError and ValueError.

    Both lists are in one order, so neither is held in memory.
    """
    expected, found = read_record(env), walk(env)
    known, there = next(expected, None), next(found, None)
    while known or there:
        if there is None or (known and known.path.split("/") < there[0].split("/")):
            assert known
            yield "missing", known.path
            known = next(expected, None)
        elif known is None or there[0] != known.path:
            yield "added", there[0]
            there = next(found, None)
        else:
            if identity(there[1]) != known.identity and not _is_as_installed(env, known):
                yield "changed", known.path
            known, there = next(expected, None), next(found, None)


def _is_as_installed(env: Path, known: Known) -> bool:
    """Whether a file has the installed content, or is what the hotfix made of it: then the original lies beside it."""
    path = env / known.path
    backup = path.with_name(f"{path.name}.{known.sha256[:16]}.orig")
    hotfixed = path.name == "scheduler.py" and backup.is_file() and hash_of(backup) == known.sha256
    return hotfixed or hash_of(path) == known.sha256


def find_damage(env: Path) -> str:
    """How the environment differs from what was installed, in a few words; empty when it does not."""
    try:
        shown: list[str] = []
        count = 0
        for how, path in differences(env):
            count += 1
            name = re.sub(r"^lib/[^/]+/site-packages/", "", path)
            package = re.match(r"([^/]+)-([^/-]+)\.dist-info/METADATA$", name)
            if package and how != "changed":
                shown.insert(0, f"package {package[1]} {package[2]} {how}")
            elif len(shown) < SHOWN:
                shown.append(f"{how} {name}")
    except OSError as error:
        return f"cannot read {error.filename}: {error.strerror}"
    except ValueError as error:
        return f"cannot read {env / FILES}: {error}"
    return f"found {count} files that differ from what was installed: {', '.join(shown[:SHOWN])}" if count else ""
