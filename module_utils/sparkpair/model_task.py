"""What the module ``model_files`` does in each of its states, from its arguments to its result."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import model, model_copy, model_fit, model_hub
from ansible.module_utils.sparkpair.model import Manifest, ModelError, Place


class Log:
    """The log of a long step: the last step's lines, each with the time of day."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.write_text("", encoding="utf-8")

    def say(self, line: str) -> None:
        """Write a line."""
        with self._path.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def run(wish: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """Do what ``state`` says. Return the module's result.

    Raises:
        ModelError, OSError: what is in the way; what was in use is untouched.
    """
    model.require_names(wish["name"], wish["revision"], wish["repo"] if not wish["source"] else "")
    place = Place(Path(wish["root"]), wish["name"], wish["revision"])
    model.require_link(place)
    before, read_again = complete(place, wish)
    state = wish["state"]
    needed = {
        "current": before is None or not model.is_current(place),
        "present": before is None,
        "shared": False,
        "copied": True,
        "listed": False,
    }[state]
    after, listing = before, dict[str, Any]()
    if state == "listed":
        listing = _listed(place, before, wish, check)
    elif not check and (needed or read_again or state == "shared"):
        os.umask(0o022)
        if before is not None and read_again:
            model.remember(place.path)
        if state == "current":
            model.switch(place)
        elif needed or state == "shared":
            with model.hold(place):
                after = _work(state, place, wish, Log(Path(wish["log"])))
    return {
        "changed": needed,
        "needed": needed,
        "complete": before is not None,
        "touched": read_again,
        "digest": after.digest if after else "",
        "path": str(place.path),
        "listing": listing,
    }


def complete(place: Place, wish: Mapping[str, Any]) -> tuple[Manifest | None, int]:
    """Return the manifest of the weights when they are complete, and what the source has now, else None; and how many
    files had to be read for that: those that look changed, or all of them."""
    manifest = model.read_manifest(place.path)
    if manifest is None:
        return None, 0
    if wish["source"] and manifest.origin != model.fingerprint(Path(wish["source"])):
        return None, 0
    suspects = manifest.files if wish["verify"] else model.touched(place.path, manifest)
    if model.damaged(place.path, suspects):
        return None, len(suspects)
    return manifest, len(suspects)


def _listed(place: Place, manifest: Manifest | None, wish: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """Return bytes of all files and of the weights, and what counts of the config, from where it is to be had."""
    if manifest is not None:
        return _listing({f.path: f.size for f in manifest.files}, place.path)
    if wish["source"]:
        folder = Path(wish["source"])
        model.fingerprint(folder)
        return _listing({path: (folder / path).stat().st_size for path in model.list_files(folder)}, folder)
    if not wish["repo"]:
        raise ModelError(NOWHERE)
    if check and not Path(wish["python"]).exists():
        # A check on a fresh node: the environment whose Python would ask is not there yet.
        return {"size": 0, "weights": 0, "config": {}}
    found: dict[str, Any] = model_hub.listing(place, wish["repo"], wish["token"], wish["ignore"], wish["python"])
    return found


def _listing(sizes: Mapping[str, int], folder: Path) -> dict[str, Any]:
    model.require_usable(folder, sizes)
    return {
        "size": sum(sizes.values()),
        "weights": model.weight_bytes(sizes),
        "config": model_fit.facts(model.read_json(folder / "config.json")),
    }


NOWHERE = "no weights here and none to fetch: set model_repo and model_revision, or model_source"


def _work(state: str, place: Place, wish: Mapping[str, Any], log: Log) -> Manifest:
    if state == "shared":
        server = model_copy.Server(wish["address"], wish["port"], wish["secret"], place.path, wish["peers"])
        log.say(f"serving {server.manifest.size / 1e9:.2f} GB to {wish['peers']} peer(s) on {wish['address']}")
        server.serve()
        return server.manifest
    if state == "copied":
        source = model_copy.Source(wish["address"], wish["port"], wish["secret"])
        return model_copy.copy(place, source, wish["streams"], log.say)
    if wish["source"]:
        return model.take_folder(place, Path(wish["source"]), log.say)
    if not wish["repo"]:
        raise ModelError(NOWHERE)
    return model_hub.download(
        place, wish["repo"], wish["token"], wish["ignore"], wish["python"], wish["streams"], log.say
    )
