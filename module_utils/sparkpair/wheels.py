"""The wheels of one environment on a node: all of them, checked against the lock, or absent.

The head gets them once: out of a folder that the owner filled, or by pip. The others copy them from the head with the
same server and client that copy weights, so they need no internet. They lie in ``<root>/wheels/<digest>``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from ansible.module_utils.sparkpair import model, model_copy, wheel_download
from ansible.module_utils.sparkpair.env_lock import Lock, Requirement
from ansible.module_utils.sparkpair.model import Manifest, Place

Say = Callable[[str], None]


def place_of(root: Path, digest: str) -> Place:
    """Return where the wheels of an environment belong."""
    return Place(root, "wheels", digest)


def read(place: Place, wanted: Iterable[Requirement]) -> Manifest | None:
    """Return the manifest of the wheels when all that are wanted are there with their sizes, else None."""
    manifest = model.read_manifest(place.path)
    return manifest if manifest and not wheel_download.lacking(wanted, _hashes(manifest)) else None


def take(
    place: Place, wanted: tuple[Requirement, ...], folder: Path | None, lock: Lock, python: str, say: Say
) -> Manifest:
    """Put the wheels in place: out of ``folder``, or what earlier environments have and the rest from the index.

    Raises:
        WheelError: a wheel is missing in the folder or cannot be downloaded; what is complete stays for the next run.
        ModelError, OSError: no space.
    """
    if manifest := read(place, wanted):
        return manifest
    if folder and not folder.is_dir():
        raise wheel_download.WheelError(f"found no folder {folder} on this node, expected vllm_env_wheelhouse there")
    place.partial.mkdir(parents=True, exist_ok=True)
    say(f"{len(wanted)} wheels, {lock.download / 1e9:.1f} GB, from {folder or 'the index'}")
    locked = {digest for r in wanted for digest in r.hashes}
    for wheel, sha256 in [*_earlier(place), *(_in_folder(folder) if folder else [])]:
        if sha256 in locked and not (place.partial / wheel.name).exists():
            _link(wheel, place.partial / wheel.name)
    files = _drop_strangers(place.partial, wanted, say)
    lacking = wheel_download.lacking(wanted, {f.path: f.sha256 for f in files})
    if lacking and folder:
        names = ", ".join(f"{r.name}=={r.version}" for r in lacking[:5])
        raise wheel_download.WheelError(
            f"found {folder} without {len(lacking)} of the {len(wanted)} locked wheels ({names}), "
            "expected one with a locked sha256 of each: add them there"
        )
    if lacking:
        model.require_space(place.root, lock.download)
        with_pip = _venv_with_pip(place, python)
        try:
            wheel_download.download([*with_pip, "--no-cache-dir"], lacking, lock, place.partial, say)
        finally:
            shutil.rmtree(_pip_folder(place), ignore_errors=True)
        files = _drop_strangers(place.partial, wanted, say)
        if lacking := wheel_download.lacking(wanted, {f.path: f.sha256 for f in files}):
            raise wheel_download.WheelError(f"still missing: {', '.join(r.name for r in lacking)}; run again")
    manifest = Manifest(files)
    model.finish(place, manifest)
    return manifest


def serve(place: Place, address: str, port: int, secret: str, peers: int, say: Say) -> Manifest:
    """Serve the wheels to ``peers`` peers until all have reported. Raises ModelError."""
    server = model_copy.Server(address, port, secret, place.path, peers)
    say(f"serving {server.manifest.size / 1e9:.2f} GB of wheels to {peers} peer(s) on {address}")
    server.serve()
    return server.manifest


def copy(place: Place, address: str, port: int, secret: str, streams: int, say: Say) -> Manifest:
    """Copy the wheels from the head. Raises ModelError and OSError."""
    return model_copy.copy(place, model_copy.Source(address, port, secret), streams, say)


def _hashes(manifest: Manifest) -> dict[str, str]:
    return {f.path: f.sha256 for f in manifest.files}


def _in_folder(folder: Path) -> list[tuple[Path, str]]:
    """Return the wheels that the owner put on the node, each with its sha256."""
    return [(folder / f.path, f.sha256) for f in model.hash_folder(folder, lambda _: None) if f.path.endswith(".whl")]


def _earlier(place: Place) -> list[tuple[Path, str]]:
    """Return the wheels of other environments, each with its sha256: a new lock shares most of them."""
    folders = [folder for folder in place.path.parent.glob("*") if folder != place.path]
    found = [(folder, model.read_manifest(folder)) for folder in folders]
    return [(folder / f.path, f.sha256) for folder, manifest in found if manifest for f in manifest.files]


def _link(source: Path, target: Path) -> None:
    """Give a wheel a second name, or copy it where that is another file system; in one step."""
    fresh = target.with_name(f".{target.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    fresh.replace(target)


def _drop_strangers(folder: Path, wanted: tuple[Requirement, ...], say: Say) -> tuple[model.File, ...]:
    """Remove what no locked sha256 names. Return the entries of what stays."""
    files = model.hash_folder(folder, lambda _: None)
    names = wheel_download.strangers(wanted, {f.path: f.sha256 for f in files})
    for name in names:
        (folder / name).unlink()
        say(f"{name} has another sha256 than the lock, removed")
    return tuple(f for f in files if f.path not in names)


def _pip_folder(place: Place) -> Path:
    folder: Path = place.root / ".pip"
    return folder


def _venv_with_pip(place: Place, python: str) -> list[str]:
    """Return the command of a pip of this node's Python, in an environment that is thrown away."""
    folder = _pip_folder(place)
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([python, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise wheel_download.WheelError(
            f"found no pip for {python} ({(done.stdout + done.stderr).strip()[-200:]}), expected python3-venv: "
            "ansible-playbook playbooks/gpu.yml"
        )
    return [str(folder / "bin/python"), "-m", "pip"]
