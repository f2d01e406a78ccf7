"""What a node would serve, as short digests: the agents compare them before every start, and status shows them."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST = "sparkpair-env.json"
SCHEDULER = "vllm/v1/core/sched"
MODEL_MANIFEST = "sparkpair-model.json"


def digest_files(files: Iterable[Path]) -> str:
    """First 12 hexadecimal digits of the sha256 over names and contents; empty when there is no file."""
    total, any_file = hashlib.sha256(), False
    for file in sorted(files):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        any_file = True
    return total.hexdigest()[:12] if any_file else ""


def link_target(link: Path, levels: int) -> str:
    """The last `levels` parts of where a symlink points, or an empty string when there is none."""
    return "/".join(link.resolve().parts[-levels:]) if link.is_symlink() and link.exists() else ""


def read_digests(root: Path, model: Path, nccl: str = "") -> dict[str, str]:
    """What would be served from this node's disk.

    env: digest of the environment's lock; packages: what is in it; content: digest of its files as they were installed;
    python: the interpreter and libc of now; scheduler: digest of vLLM's scheduler folder, patched or not; nccl: see
    `read_nccl`; model: name/revision and the digest of its files, since a local folder may change under the same
    revision.
    """
    env = root / "current"
    schedulers = sorted((env / "lib").glob(f"python3.*/site-packages/{SCHEDULER}"))
    installed = _read_json(env / MANIFEST)
    return {
        "env": link_target(env, 1),
        "packages": ", ".join(" ".join(item) for item in sorted(installed.get("packages", {}).items())),
        "content": str(installed.get("content", "")),
        "python": read_python(env / "bin/python"),
        "scheduler": digest_files(schedulers[0].glob("*.py")) if schedulers else "",
        "nccl": read_nccl(root, nccl),
        "model": f"{link_target(model, 2)} {_read_json(model / MODEL_MANIFEST).get('digest', '')[:12]}".strip(),
    }


def serves(digests: dict[str, str]) -> str:
    """The environment and the scheduler in it by one name, which also names the folder of their caches."""
    return f"{digests['env']}-{digests['scheduler']}"


def read_python(python: Path) -> str:
    """Version of an interpreter and of the C library under it ("3.12.3 glibc 2.39"); empty when it does not answer."""
    code = "import os, platform; print(platform.python_version(), os.confstr('CS_GNU_LIBC_VERSION'))"
    try:
        done = subprocess.run([str(python), "-ISc", code], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _read_json(path: Path) -> dict[str, Any]:
    """A manifest that a stage wrote; empty when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_nccl(root: Path, override: str = "") -> str:
    """Which NCCL vLLM would load: path and sha256 of the library that `override` names, or the wheel's record.

    A wheel's RECORD holds the hash of its library, so a few kilobytes stand for 200 MB. Empty without NCCL.
    """
    if override:
        library = Path(override).resolve()
        if not library.is_file():
            return f"{override}: missing"
        now = library.stat()
        return f"{library}:{_hash_library(library, (now.st_size, now.st_mtime_ns, now.st_ino, now.st_ctime_ns))}"
    records = sorted((root / "current" / "lib").glob("python3.*/site-packages/nvidia_nccl*.dist-info/RECORD"))
    return f"{records[0].parent.name.removesuffix('.dist-info')}:{digest_files(records)}" if records else ""


@functools.lru_cache(maxsize=4)
def _hash_library(library: Path, _state: tuple[int, ...]) -> str:
    """The first 12 digits of a library's sha256, read again when its state on disk changed."""
    with library.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
