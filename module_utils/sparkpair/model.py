"""The weights of a model on one node: a folder that is complete or absent, and a manifest that says what is
in it.

Layout under ``root``::

    <name>/<revision>/                complete; holds sparkpair-model.json
    <name>/.partial-<revision>/       being fetched or copied; a later run goes on with it
    current -> <name>/<revision>      what the units serve

The manifest names every file with its size, the sha256 of the whole and the sha256 of each piece of
``PIECE`` bytes. Pieces make a copy parallel, resumable and cheap to repair, and prove the whole file
without a second reading. Standard library only; every function works on paths given to it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "sparkpair-model.json"

PIECE = 64 << 20
"""Bytes of a piece. A 5 GB shard has 75: enough to keep all streams busy, few enough for a small manifest."""

BLOCK = 1 << 20
"""Bytes read, hashed and written at once; hashing a block of this size does not hold Python's lock."""

MARGIN = 1 << 30
"""Bytes that stay free on the disk after the weights are there."""

WAIT = 60.0
"""Seconds to wait for another run that holds the folder."""

Progress = Callable[[str], None]


class ModelError(Exception):
    """The weights cannot be put in place; the text says what was found, what was expected and what mends it."""


@dataclass(frozen=True)
class File:
    """One file of a model: path relative to the folder, size in bytes, sha256 of the whole and of each piece."""

    path: str
    size: int
    sha256: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a complete folder holds. ``origin`` fingerprints where it was taken from (empty on copies)."""

    files: tuple[File, ...]
    origin: str = ""

    @property
    def digest(self) -> str:
        """Return 16 hex digits over names, sizes and hashes: equal on two nodes when the weights are."""
        lines = [f"{f.path}\0{f.size}\0{f.sha256}\n" for f in sorted(self.files, key=lambda f: f.path)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(f.size for f in self.files)

    def to_json(self) -> str:
        """Return the text of the manifest."""
        content = {"digest": self.digest, "origin": self.origin, "files": [asdict(f) for f in self.files]}
        return json.dumps(content, indent=1) + "\n"


@dataclass(frozen=True)
class Place:
    """Where the weights of one revision belong."""

    root: Path
    name: str
    revision: str

    @property
    def path(self) -> Path:
        """Return the complete folder."""
        return self.root / self.name / self.revision

    @property
    def partial(self) -> Path:
        """Return the folder in which it is made."""
        return self.root / self.name / f".partial-{self.revision}"

    @property
    def link(self) -> Path:
        """Return the symlink that the units follow."""
        return self.root / "current"


def parse_manifest(text: str) -> Manifest:
    """Parse a manifest, also one that came over the network.

    Raises:
        ModelError: not a manifest, or one that names a path outside of its folder.
    """
    try:
        content = json.loads(text)
        files = tuple(
            File(str(f["path"]), int(f["size"]), str(f["sha256"]), tuple(map(str, f["pieces"])))
            for f in content["files"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"not a manifest of a model: {error}") from error
    for file in files:
        path = PurePosixPath(file.path)
        leads_out = not path.parts or path.is_absolute() or ".." in path.parts or "\0" in file.path
        if leads_out or len(file.pieces) != piece_count(file.size):
            raise ModelError(f"the manifest has an impossible entry: {file.path!r}, {file.size} bytes")
    if not files:
        raise ModelError("the manifest names no file")
    return Manifest(files, str(content.get("origin", "")))


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a complete folder whose files have their sizes, None for anything else."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / f.path).stat().st_size == f.size for f in manifest.files)
    except (OSError, ModelError):
        return None
    return manifest if whole else None


def piece_count(size: int) -> int:
    """Return the number of pieces of a file of ``size`` bytes; an empty file has one, empty, piece."""
    return max(1, -(-size // PIECE))


def hash_piece(descriptor: int, index: int, size: int, also: Iterable[Any] = ()) -> str:
    """Return the sha256 of piece ``index`` of a file of ``size`` bytes; ``also`` are hashes that see the bytes too."""
    position, end = index * PIECE, min(size, (index + 1) * PIECE)
    digest = hashlib.sha256()
    while position < end:
        block = os.pread(descriptor, min(BLOCK, end - position), position)
        if not block:
            break
        for each in (digest, *also):
            each.update(block)
        position += len(block)
    return digest.hexdigest()


def hash_file(folder: Path, path: str) -> File:
    """Read a file once. Return its entry for the manifest."""
    descriptor = os.open(folder / path, os.O_RDONLY)
    try:
        size, whole = os.fstat(descriptor).st_size, hashlib.sha256()
        pieces = tuple(hash_piece(descriptor, i, size, [whole]) for i in range(piece_count(size)))
    finally:
        os.close(descriptor)
    return File(path, size, whole.hexdigest(), pieces)


def hash_folder(folder: Path, say: Progress) -> tuple[File, ...]:
    """Return the entries of all files in a folder, several read at once."""
    paths = sorted(list_files(folder))
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        files = []
        for entry in pool.map(lambda path: hash_file(folder, path), paths):
            files.append(entry)
            say(f"checked {entry.path}, {entry.size / 1e9:.2f} GB")
    return tuple(files)


def list_files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of the files that belong to a model: all but hidden ones and the manifest.

    Symlinks are followed, because the cache of huggingface_hub is a folder of symlinks.
    """
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = (Path(directory) / name).relative_to(folder).as_posix()
            if not name.startswith(".") and path != MANIFEST:
                yield path


def damaged(folder: Path, manifest: Manifest) -> list[str]:
    """Read everything. Return the paths of the files that are not as the manifest says."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return [
            f.path
            for f, now in zip(
                manifest.files, pool.map(lambda f: hash_file(folder, f.path), manifest.files), strict=True
            )
            if f != now
        ]


def require_usable(folder: Path, files: Iterable[str]) -> None:
    """Check that the files are those of a servable model.

    Raises:
        ModelError: no config.json, no weights, or a shard that the index names is missing.
    """
    present = set(files)
    if "config.json" not in present:
        raise ModelError(f"{folder} is not a model: it has no config.json; check model_source or model_repo")
    shards: set[str] = set()
    for index in sorted(p for p in present if p.endswith(".safetensors.index.json") and "/" not in p):
        try:
            shards.update(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{folder / index} cannot be read: {error}; fetch the model again") from error
    if missing := sorted(shards - present):
        raise ModelError(f"{folder} lacks {len(missing)} of {len(shards)} shards, first {missing[0]}; fetch them again")
    if not shards and not any(p.endswith((".safetensors", ".bin")) for p in present):
        raise ModelError(f"{folder} holds no weights (*.safetensors); check model_source or model_repo")


def require_space(root: Path, size: int, present: int = 0) -> None:
    """Check the disk before ``size`` bytes, of which ``present`` are there already, are written.

    Raises:
        ModelError: less than what is to come plus ``MARGIN`` is free.
    """
    root.mkdir(parents=True, exist_ok=True)
    wanted, free = size - present + MARGIN, shutil.disk_usage(root).free
    if free < wanted:
        raise ModelError(
            f"{root} has {free / 1e9:.1f} GB free, the weights want {wanted / 1e9:.1f} GB; "
            "free space or mount a larger disk there"
        )


def fingerprint(source: Path) -> str:
    """Return a cheap fingerprint of a source folder: names, sizes and times of its files.

    Raises:
        ModelError: there is no such folder.
    """
    if not source.is_dir():
        raise ModelError(f"model_source {source} is not a folder on the head")
    lines = []
    for path in sorted(list_files(source)):
        stat = (source / path).stat()
        lines.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def take_folder(place: Place, source: Path, say: Progress) -> Manifest:
    """Copy a model from a folder of this node into its place. Return its manifest.

    Raises:
        ModelError: the source is no model, or there is no space.
    """
    origin = fingerprint(source)
    paths = sorted(list_files(source))
    require_usable(source, paths)
    require_space(place.root, sum((source / p).stat().st_size for p in paths))
    shutil.rmtree(place.partial, ignore_errors=True)
    for path in paths:
        target = place.partial / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target)
        say(f"copied {path}")
    manifest = Manifest(hash_folder(place.partial, say), origin)
    finish(place, manifest)
    return manifest


def finish(place: Place, manifest: Manifest) -> None:
    """Write the manifest into the partial folder and move it into place; a folder that stood there is replaced."""
    for directory, _, names in os.walk(place.partial):
        Path(directory).chmod(0o755)
        for name in names:
            (Path(directory) / name).chmod(0o644)
    (place.partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    (place.partial / MANIFEST).chmod(0o644)
    if place.path.exists():
        old = place.path.with_name(f".old-{place.revision}")
        shutil.rmtree(old, ignore_errors=True)
        place.path.rename(old)
        place.partial.rename(place.path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        place.partial.rename(place.path)


def reopen(place: Place) -> None:
    """Make the partial folder out of what there is: a folder that is to be mended goes back to partial."""
    if place.path.exists():
        shutil.rmtree(place.partial, ignore_errors=True)
        place.path.rename(place.partial)
        (place.partial / MANIFEST).unlink(missing_ok=True)
    place.partial.mkdir(parents=True, exist_ok=True)


def is_current(place: Place) -> bool:
    """Return whether the symlink names the place."""
    return place.link.is_symlink() and place.link.readlink() == Path(place.name) / place.revision


def require_link(place: Place) -> None:
    """Check that the symlink can be set.

    Raises:
        ModelError: a real file or folder, which is never replaced, has its name.
    """
    if place.link.exists() and not place.link.is_symlink():
        raise ModelError(f"found a file or folder {place.link}, expected a symlink to one of the models; move it away")


def switch(place: Place) -> None:
    """Point the symlink at the place, in one step.

    Raises:
        ModelError: the weights are not complete, or something else has the symlink's name.
    """
    if read_manifest(place.path) is None:
        raise ModelError(f"{place.path} is not complete; run playbooks/model.yml")
    require_link(place)
    fresh = place.root / ".current.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path(place.name) / place.revision)
    fresh.replace(place.link)


@contextlib.contextmanager
def hold(place: Place) -> Iterator[None]:
    """Hold the node's weights: one run at a time.

    Raises:
        ModelError: another run holds them for longer than ``WAIT``.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with (place.root / ".lock").open("w") as lock:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another run holds {place.root}/.lock; wait for it to end and run again"
                    ) from None
                time.sleep(0.5)
        yield


def require_names(name: str, revision: str, repo: str) -> None:
    """Check what becomes a path, and that a download is pinned.

    Raises:
        ModelError: a name that is no plain name, or a repository without a commit.
    """
    for variable, value in (("model_name", name), ("model_revision", revision)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ModelError(f"{variable}={value!r} is not a plain name (letters, digits, dot, dash, underscore)")
    if name == "current":
        raise ModelError("model_name='current' is the symlink's own name; choose another one")
    if repo and not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ModelError(
            f"model_revision={revision!r} is not a commit (40 hex digits): branches move, so nodes would differ"
        )
