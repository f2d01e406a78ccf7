"""A set of text files that belong together: what would change, and how each is replaced atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


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


def replace(path: Path, text: str, mode: int) -> None:
    """Write a file so that a reader sees the old or the new one, owned by root; makes its folder (0755)."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
