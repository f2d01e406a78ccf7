"""The weights of a model on one node: a folder that is complete or absent, and a manifest that says what is
in it.

Layout under ``root``::

    <name>/<revision>/                complete; holds sparkpair-model.json
    <name>/.partial-<revision>/       being fetched, copied or mended; a later run goes on with it
    current -> <name>/<revision>      what the units serve

A complete folder is never written to: it is replaced by another one, whose unchanged files are links to the same bytes.

The manifest names every file with its size, the sha256 of the whole and the sha256 of each piece of
``PIECE`` bytes. Pieces make a copy parallel, resumable and cheap to repair, and prove the whole file
without a second reading. Beside it lies a list of inode, size and time of each file as it was when it was proven: what
differs from that is read again at the next run, so a changed byte is found without reading the rest. (Bytes that rot on
the disk change no time; ``verify`` reads everything.) Standard library only; every function works on paths given to it.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils.sparkpair.files import replace_folder

MANIFEST = "sparkpair-model.json"
SEEN = ".sparkpair-seen.json"
"""Inode, size and time (ns) of each file when its bytes were last proven; local to the node."""

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


def damaged(folder: Path, files: Iterable[File]) -> list[str]:
    """Read the files. Return the paths of those that are not as their entries say."""
    entries = list(files)
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda f: hash_file(folder, f.path), entries)
        return [f.path for f, now in zip(entries, found, strict=True) if f != now]


def remember(folder: Path) -> None:
    """Note how the files of a folder, whose bytes were just proven, look from outside."""
    note = folder / f"{SEEN}.new"
    note.write_text(json.dumps(_looks(folder)), encoding="utf-8")
    note.replace(folder / SEEN)


def touched(folder: Path, manifest: Manifest) -> list[File]:
    """Return the files that do not look as they did when they were proven; all of them where that is not known."""
    try:
        seen = json.loads((folder / SEEN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        seen = {}
    now = _looks(folder)
    return [f for f in manifest.files if f.path not in now or now[f.path] != seen.get(f.path)]


def _looks(folder: Path) -> dict[str, list[int]]:
    stats = {path: (folder / path).stat() for path in list_files(folder)}
    return {path: [stat.st_ino, stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def require_usable(folder: Path, files: Iterable[str]) -> None:
    """Check that the files are those of a servable model.

    Raises:
        ModelError: no config.json, no weights, or a shard that an index names is missing.
    """
    present = set(files)
    indexes = {path: read_json(folder / path) for path in present if is_index(path)}
    require_whole(f"model folder {folder}", present, indexes)


def require_whole(what: str, present: set[str], indexes: Mapping[str, Any]) -> None:
    """Check names of files against the indexes among them, by name, before or after they were fetched.

    Raises:
        ModelError: as ``require_usable``; ``what`` names the folder or the repository.
    """
    if "config.json" not in present:
        raise ModelError(f"found no config.json in {what}, expected a model: check model_source or model_repo")
    shards: set[str] = set()
    for path, index in sorted(indexes.items()):
        try:
            shards.update(index["weight_map"].values())
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"found no weight_map in {path} of {what}, expected the index of its shards") from error
    if missing := sorted(shards - present):
        raise ModelError(
            f"found {what} without {len(missing)} of the {len(shards)} shards of its index, first {missing[0]}, "
            f"expected all of them: complete it, or choose another model_revision"
        )
    if not shards and not weight_bytes(dict.fromkeys(present, 1)):
        raise ModelError(f"found no weights (*.safetensors) in {what}: check model_source or model_repo")


def is_index(path: str) -> bool:
    """Return whether a path is an index of shards."""
    return path.endswith(".safetensors.index.json") and "/" not in path


def weight_bytes(sizes: Mapping[str, int]) -> int:
    """Return the bytes of the weights that vLLM loads: safetensors, or the older format where there are none."""
    for suffix in (".safetensors", ".bin"):
        if found := sum(size for path, size in sizes.items() if path.endswith(suffix) and "/" not in path):
            return found
    return 0


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a model.

    Raises:
        ModelError: it is not one.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; fetch the model again") from error


def require_space(folder: Path, size: int) -> None:
    """Check the disk before ``size`` bytes are written below ``folder``, which may not be there yet.

    Raises:
        ModelError: less than them and ``MARGIN`` is free.
    """
    present = next(p for p in (folder, *folder.parents) if p.exists())
    wanted, free = size + MARGIN, shutil.disk_usage(present).free
    if size and free < wanted:
        raise ModelError(
            f"found {free / 1e9:.1f} GB free for {folder}, expected {wanted / 1e9:.1f} GB for the weights that are to "
            f"come; remove models that are no longer served, or mount a larger disk there: df -h {present}"
        )


def present_bytes(place: Place) -> int:
    """Return the bytes of a revision that are on the disk already, complete or not."""
    folders = [folder for folder in (place.partial, place.path) if folder.is_dir()]
    files = {p.relative_to(f): p.stat() for f in reversed(folders) for p in f.rglob("*") if p.is_file()}
    # Files of an interrupted copy have their final size at once, and holes where bytes are to come.
    return sum(min(stat.st_size, stat.st_blocks * 512) for stat in files.values())


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
    reopen(place, paths)
    kept = {path for path in paths if _same(source / path, place.partial / path)}
    require_space(place.root, sum((source / path).stat().st_size for path in paths if path not in kept))
    for path in paths:
        if path not in kept:
            replace_file(source / path, place.partial / path)
            say(f"copied {path}")
    manifest = Manifest(hash_folder(place.partial, say), origin)
    finish(place, manifest)
    return manifest


def _same(one: Path, other: Path) -> bool:
    """Return whether two files hold the same bytes; a missing one never does."""
    if not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    return hash_file(one.parent, one.name) == hash_file(other.parent, other.name)


def replace_file(source: Path, target: Path) -> None:
    """Copy a file; what the target's name meant before keeps its bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)


def finish(place: Place, manifest: Manifest) -> None:
    """Write the manifest into the partial folder and move it into place; a folder that stood there is replaced."""
    for directory, _, names in os.walk(place.partial):
        Path(directory).chmod(0o755)
        for name in names:
            (Path(directory) / name).chmod(0o644)
    (place.partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    (place.partial / MANIFEST).chmod(0o644)
    remember(place.partial)
    replace_folder(place.partial, place.path)


def reopen(place: Place, wanted: Iterable[str] | None = None) -> None:
    """Make the partial folder out of what there is: what an earlier run left, and links to the files in place.

    ``wanted`` are the paths that may stay (all). The folder in place is not touched: nobody may write into its files.
    """
    place.partial.mkdir(parents=True, exist_ok=True)
    for path in list(list_files(place.path)):
        target = place.partial / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(place.path / path)
    if wanted is not None:
        allowed = {place.partial / path for path in wanted}
        for stranger in [p for p in place.partial.rglob("*") if not p.is_dir() and p not in allowed]:
            stranger.unlink()


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
