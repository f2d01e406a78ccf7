"""What belongs to one environment in service: the unit, its configuration, the agent, and which model it serves.

When the pair serves, the serve stage keeps all of it in one file for each environment. The rollback puts the files of
another environment back and points the symlinks at it. The patched scheduler lies in the environment itself, and the
caches are named after both, so they come back with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import digests, files
from ansible.module_utils.sparkpair.env import RELEASES, current_name, judge

LINKS = ("/opt/sparkpair/current", "/var/lib/sparkpair/models/current")
SETTINGS = "/etc/sparkpair/rank.env"
"""Put back last: until then it names another environment than the symlink, and the agents start nothing."""
CACHE = re.compile(r"[0-9a-f]{16}-[0-9a-f]*")
"""Names of folders with caches, see `digests.serves`."""


class ReleaseError(Exception):
    """There is nothing to keep or to go back to; the text says what was found, what was expected and what mends it."""


@dataclass(frozen=True)
class Places:
    """Where things are on a node."""

    root: Path = Path("/opt/sparkpair")
    releases: Path = RELEASES
    caches: Path = Path("/var/cache/sparkpair-rank")
    links: Sequence[str] = LINKS
    settings: str = SETTINGS


@dataclass(frozen=True)
class Release:
    """One environment as it served: its name, that of its caches, files (path to mode, text), symlinks (to target)."""

    env: str
    serves: str
    patched: bool
    files: Mapping[str, tuple[int, str]]
    links: Mapping[str, str]

    def variables(self, settings: str) -> dict[str, str]:
        """Return the variables by which all running processes are known."""
        text = self.files[settings][1] if settings in self.files else ""
        return dict(re.findall(r'^(DSPARK_\w+|SPARKPAIR_PAIR_DIGEST)="(.*)"$', text, re.MULTILINE))

    def to_bytes(self) -> bytes:
        """Return the content of the file that keeps it."""
        return (json.dumps(vars(self), indent=1, sort_keys=True) + "\n").encode()


def observe(names: Sequence[str], places: Places) -> Release:
    """Return what is in service now. Raises OSError and EnvError."""
    env = current_name(places.root)
    patched = any((places.root / "current/lib").glob(f"*/site-packages/{digests.SCHEDULER}/scheduler.py.*.orig"))
    kept = {name: (Path(name).stat().st_mode & 0o777, Path(name).read_text(encoding="utf-8")) for name in names}
    links = {link: str(Path(link).readlink()) for link in places.links if Path(link).is_symlink()}
    return Release(env, serves_of(places.root / "envs" / env), patched, kept, links)


def serves_of(env: Path) -> str:
    """Return what an environment is called together with the scheduler in it."""
    folders = sorted((env / "lib").glob(f"*/site-packages/{digests.SCHEDULER}"))
    scheduler = digests.digest_files(folders[0].glob("*.py")) if folders else ""
    return str(digests.serves({"env": env.name, "scheduler": scheduler}))


def read(file: Path) -> Release:
    """Read a kept release. Raises ReleaseError."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        texts = {str(path): (int(mode), str(text)) for path, (mode, text) in content.pop("files").items()}
        return Release(**content, files=texts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{file} cannot be read ({error}); remove it") from error


def newest_first(places: Places) -> list[Path]:
    """Return the kept releases, the one that was last in service first."""
    return sorted(places.releases.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)


def save(names: Sequence[str], places: Places, check: bool) -> bool:
    """Keep what is in service, and remove what is kept of environments that are gone. Return whether that changed."""
    try:
        wanted = observe(names, places)
    except FileNotFoundError:
        if check:  # nothing is written yet
            return True
        raise
    file = places.releases / f"{wanted.env}.json"
    stale = files.differs(file, wanted.to_bytes(), 0o600) or newest_first(places)[0] != file
    if stale and not check:
        places.releases.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.put(file, wanted.to_bytes(), 0o600)
    gone = [kept for kept in places.releases.glob("*.json") if not (places.root / "envs" / kept.stem).is_dir()]
    serving = {wanted.serves} | {read(kept).serves for kept in places.releases.glob("*.json") if kept not in gone}
    old = [folder for folder in places.caches.glob("*") if CACHE.fullmatch(folder.name) and folder.name not in serving]
    if not check:
        for kept in gone:
            kept.unlink()
        for folder in old:
            shutil.rmtree(folder)
    return stale or bool(gone) or bool(old)


def choose(to: str, places: Places) -> Path:
    """Return the kept release to go to: that of `to`, else the last one in service that is not in use.

    Raises:
        ReleaseError: there is none, or what it needs is damaged or gone.
    """
    current = current_name(places.root)
    found = [file for file in newest_first(places) if (file.stem == to if to else file.stem != current)]
    if not found:
        names = ", ".join(file.stem for file in newest_first(places)) or "none"
        raise ReleaseError(
            f"found no {'environment ' + to if to else 'other environment'} that served before (kept: {names}), "
            f"expected one in {places.releases}: set vllm_env_lock to the lock that you want and run site.yml"
        )
    release = read(found[0])
    env = places.root / "envs" / release.env
    manifest, damage = judge(env)
    if not manifest:
        raise ReleaseError(
            f"found {env} unusable ({damage or 'it is gone'}), expected it as it was installed: "
            "set vllm_env_lock to its lock and run site.yml"
        )
    if release.serves != serves_of(env):
        raise ReleaseError(
            f"found environment and scheduler {serves_of(env)}, expected {release.serves} as it served: "
            "set vllm_env_lock to its lock and run site.yml"
        )
    for link, target in release.links.items():
        if not (Path(link).parent / target).is_dir():
            raise ReleaseError(
                f"found no {Path(link).parent / target}, expected it for {link} of that time: set vllm_env_lock to its "
                "lock and run site.yml"
            )
    return found[0]


def restore(file: Path, places: Places, check: bool) -> tuple[Release, list[str]]:
    """Put a kept release in service; the pair must be stopped. Return it, and what changed."""
    release = read(file)
    links = {link: target for link, target in release.links.items() if _target(Path(link)) != target}
    texts = {
        path: (mode, text)
        for path, (mode, text) in sorted(release.files.items(), key=lambda item: item[0] == places.settings)
        if files.differs(Path(path), text.encode(), mode)
    }
    if not check:
        for link, target in links.items():
            fresh = Path(link).with_name(f".{Path(link).name}.new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(target)
            fresh.replace(link)
        for path, (mode, text) in texts.items():
            files.put(Path(path), text.encode(), mode)
        os.utime(file)  # in service again, so the last to go
    return release, [*links, *texts]


def _target(link: Path) -> str:
    return str(link.readlink()) if link.is_symlink() else ""
