"""Files that a module owns on a node: compared by content and mode, replaced in one step, shown as a diff."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def differs(path: Path, data: bytes | None, mode: int = 0o644) -> bool:
    """Whether `path` is not a file with this content and mode; with `data` None, whether anything is there."""
    if data is None:
        return path.exists()
    try:
        return path.read_bytes() != data or stat.S_IMODE(path.stat().st_mode) != mode
    except OSError:
        return True


def put(path: Path, data: bytes | None, mode: int = 0o644) -> None:
    """Make `path` hold `data`, or be absent: at any moment it is the old file or the new one."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def replace_folder(fresh: Path, path: Path) -> None:
    """Move the folder `fresh` to `path`, on one file system, in one step; what stood there goes."""
    old = path.with_name(f".old-{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    if _exchange(fresh, path):
        fresh.rename(old)
    else:
        if path.exists():  # a file system that cannot exchange: for a moment nothing is there, but never a part
            path.rename(old)
        fresh.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names of a file system in one step; whether both were there and that is possible."""
    at_cwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def diff(path: Path, data: bytes | None) -> dict[str, Any]:
    """What `--diff` shows for one file; bytes that are not text show their length."""

    def shown(content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError:
            return f"{len(content)} bytes\n"

    before = path.read_bytes() if path.is_file() else b""
    return {
        "before_header": str(path),
        "after_header": str(path),
        "before": shown(before),
        "after": shown(data or b""),
    }


def read(path: Path) -> str | None:
    """The file's text, or None when there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def plan(files: Mapping[str, str], modes: Mapping[str, int], prune: str) -> tuple[dict[str, str], list[str]]:
    """Files to write (path to text), and files to remove: those below the folder `prune` that the set does not name."""
    write = {}
    for name, text in files.items():
        path = Path(name)
        same = read(path) == text and path.stat().st_mode & 0o777 == modes.get(name, 0o644) and path.stat().st_uid == 0
        if not same:
            write[name] = text
    present = sorted(Path(prune).rglob("*")) if prune else []
    return write, [str(path) for path in present if path.is_file() and str(path) not in files]
