#!/usr/bin/env python3
"""Make a hash lock: ``lock.py VERSION [--profile PROFILE]`` writes ``locks/VERSION-PROFILE.txt``.

A profile is one target platform; ``PROFILE.in`` beside this file holds its constraints, or its whole list.
``uv`` resolves them for that platform from wheels alone, so neither the hardware nor its Python is needed.
Of each distribution only the wheels that fit the platform are written, and no address of an index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lab.wheelhouse import shim  # noqa: E402
from module_utils.sparkpair.env_lock import Lock, Requirement, normalize, parse_lock, render_lock  # noqa: E402


@dataclass(frozen=True)
class Profile:
    """A target: Python, machine, oldest glibc; ``resolve``: dependencies are looked up, not all listed."""

    python: str
    machine: str
    glibc: tuple[int, int]
    resolve: bool
    notes: str


PROFILES = {
    # DGX OS 7 is Ubuntu 24.04: Python 3.12, glibc 2.39.
    "aarch64-cu130": Profile(
        "3.12", "aarch64", (2, 39), True,
        "A DGX Spark: DGX OS 7, CUDA 13.0 driver. Resolved, not run, on other hardware."),
    # The lab's nodes are Debian 12: Python 3.11, glibc 2.36.
    "x86_64-cpu": Profile(
        "3.11", "x86_64", (2, 36), False,
        "The lab: vLLM for CPUs. `vllm` itself is the lab's metadata-only shim (lab/wheelhouse.py)."),
    "x86_64-cpu-publictorch": Profile(
        "3.11", "x86_64", (2, 36), False,
        "The lab where no index has the CPU build of torch: its CUDA build and the libraries that needs."),
}  # fmt: skip


def resolve(profile: Profile, requirements: Path, version: str | None, find_links: list[Path], output: Path) -> None:
    """Run ``uv pip compile`` for the profile's platform; ``output`` becomes a pylock.toml.

    With a ``version`` that vLLM is resolved and ``requirements`` are constraints; without, they are the whole list.

    Raises:
        subprocess.CalledProcessError: no solution; uv's explanation is on stderr.
    """
    pin = output.with_name("version.txt")
    pin.write_text(f"vllm=={version}\n", encoding="ascii")
    platform = f"{profile.machine}-manylinux_{profile.glibc[0]}_{profile.glibc[1]}"
    command = [
        os.environ.get("UV", "uv"), "pip", "compile", "--no-config", "--quiet", "--no-header",
        "--generate-hashes", "--format", "pylock.toml", "--only-binary", ":all:",
        "--python-platform", platform,
        "--python-version", profile.python, "--output-file", str(output),
    ]  # fmt: skip
    command += [str(pin), "--constraint", str(requirements)] if version else [str(requirements), "--no-deps"]
    for folder in find_links:
        command += ["--find-links", str(folder)]
    subprocess.run(command, check=True)


def size_of(wheel: dict[str, Any], folder: Path) -> int:
    """Return the bytes of a wheel in ``folder``/pylock.toml: as the index says, or of the local file."""
    if "size" in wheel:
        return int(wheel["size"])
    return (folder / (wheel.get("path") or unquote(urlsplit(wheel["url"]).path))).stat().st_size


def lock_of(profile: Profile, version: str, folder: Path) -> Lock:
    """Return the lock for ``folder``/pylock.toml.

    Raises:
        ValueError: a package that comes as no wheel.
    """
    pylock = tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))
    requirements, download = [], 0
    for package in sorted(pylock["packages"], key=lambda p: normalize(p["name"])):
        wheels = package.get("wheels") or ([package["archive"]] if "archive" in package else [])
        if not wheels:
            raise ValueError(f"{package['name']} {package['version']} has no wheel for {profile.machine}")
        download += max(size_of(wheel, folder) for wheel in wheels)
        hashes = tuple(sorted({wheel["hashes"]["sha256"] for wheel in wheels}))
        requirements.append(Requirement(normalize(package["name"]), package["version"], hashes))
    return Lock(version, profile.python, profile.machine, profile.glibc, download, tuple(requirements))


def lock_uv(version: str) -> Path:
    """Write ``locks/uv.txt``: the installer itself, pinned, with its wheels for every profile's platform."""
    hashes: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        wanted = Path(name) / "uv.in"
        wanted.write_text(f"uv=={version}\n", encoding="ascii")
        for profile in PROFILES.values():
            resolve(profile, wanted, None, [], Path(name) / "pylock.toml")
            hashes.update(lock_of(profile, "none", Path(name)).requirements[0].hashes)
    target = ROOT / "locks" / "uv.txt"
    notes = "# The installer, put on every node. Made by `make lock`; do not edit.\n"
    pin = Requirement("uv", version, tuple(sorted(hashes)))
    target.write_text(f"{notes}{pin.line()}\n", encoding="ascii")
    return target


def lock_vllm(name: str, version: str, find_links: list[Path]) -> Path:
    """Write the lock of one profile and one version of vLLM. Return its path."""
    profile = PROFILES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not profile.resolve:
            wheel, data = shim(f"{version}+cpu")
            (folder / wheel).write_bytes(data)
            find_links = [folder, *find_links]
        pin = version if profile.resolve else None
        resolve(profile, ROOT / "locks" / f"{name}.in", pin, find_links, folder / "pylock.toml")
        lock = lock_of(profile, version, folder)
    target = ROOT / "locks" / f"{version}-{name}.txt"
    text = render_lock(lock, f"{profile.notes}\nMade by `make lock` from {name}.in; do not edit.")
    parse_lock(text)
    target.write_text(text, encoding="ascii")
    print(f"{len(lock.requirements)} wheels, {lock.download / 1e9:.2f} GB to download")
    return target


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="version of vLLM (or of uv)")
    parser.add_argument("--profile", choices=[*PROFILES, "uv"], default="aarch64-cu130")
    parser.add_argument("--find-links", type=Path, default=[], action="append", help="folder with further wheels")
    args = parser.parse_args(argv)
    if args.profile == "uv":
        print(lock_uv(args.version))
    else:
        print(lock_vllm(args.profile, args.version, args.find_links))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"lock.py: {error}")
