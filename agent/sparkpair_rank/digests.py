"""What a node would serve, as short digests: the agents compare them before every start, and status shows them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SCHEDULER = "vllm/v1/core/sched"


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


def read_digests(root: Path, model: Path) -> dict[str, str]:
    """What would be served from this node's disk.

    env: digest of the environment; scheduler: digest of vLLM's scheduler folder, patched or not; model: name/revision.
    """
    schedulers = sorted((root / "current" / "lib").glob(f"python3.*/site-packages/{SCHEDULER}"))
    return {
        "env": link_target(root / "current", 1),
        "scheduler": digest_files(schedulers[0].glob("*.py")) if schedulers else "",
        "model": link_target(model, 2),
    }


def read_nccl(root: Path, override: str = "") -> str:
    """Which NCCL vLLM would load: name and size of the library that `override` names, or the wheel's record.

    A wheel's RECORD holds the hash of its library, so a few kilobytes stand for 200 MB. Empty without NCCL.
    """
    if override:
        library = Path(override).resolve()
        return f"{library.name}:{library.stat().st_size}" if library.exists() else f"{override}: missing"
    records = sorted((root / "current" / "lib").glob("python3.*/site-packages/nvidia_nccl*.dist-info/RECORD"))
    return f"{records[0].parent.name.removesuffix('.dist-info')}:{digest_files(records)}" if records else ""
