"""Download a pinned revision with the huggingface_hub of the node's vLLM environment.

The hub's client is no part of Ansible, so it runs in the environment's own Python. Everything secret goes
to it by environment variable, everything else as one JSON argument; it answers with JSON lines.

Within a run a file whose connection broke goes on by a Range. From run to run whole files are kept: the client (2.4)
begins one that it had not finished anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

from ansible.module_utils.sparkpair.model import (
    File,
    Manifest,
    ModelError,
    Place,
    Progress,
    finish,
    hash_folder,
    present_bytes,
    reopen,
    require_space,
    require_usable,
    require_whole,
    weight_bytes,
)
from ansible.module_utils.sparkpair.model_fit import facts

BEAT = 10.0
"""Seconds between lines of progress."""

PAUSES = (5.0, 30.0, 120.0)
"""Seconds between attempts when the network fails."""

# Every script says what went wrong in the same way.
_FAILED = """
except Exception as error:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    print(json.dumps({"error": type(error).__name__, "status": status, "text": str(error)}))
"""

_LIST = (
    """
import fnmatch, json, sys, tempfile
from huggingface_hub import HfApi, hf_hub_download
wish = json.loads(sys.argv[1])
try:
    info = HfApi().model_info(wish["repo"], revision=wish["revision"], files_metadata=True)
    files = [s for s in info.siblings if not any(fnmatch.fnmatch(s.rfilename, p) for p in wish["ignore"])]
    config, indexes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (s.rfilename for s in files if "/" not in s.rfilename):
            if name == "config.json" or name.endswith(".safetensors.index.json"):
                path = hf_hub_download(wish["repo"], name, revision=wish["revision"], local_dir=folder)
                with open(path, encoding="utf-8") as file:
                    content = json.load(file)
                if name == "config.json":
                    config = content
                else:
                    indexes[name] = {"weight_map": {shard: shard for shard in content["weight_map"].values()}}
    sizes = {s.rfilename: [s.size, s.lfs.sha256 if s.lfs else ""] for s in files}
    print(json.dumps({"files": sizes, "config": config, "indexes": indexes}))
"""
    + _FAILED
)

_DOWNLOAD = (
    """
import json, os, sys, threading, time
from huggingface_hub import snapshot_download
wish = json.loads(sys.argv[1])
def end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
threading.Thread(target=end_with, args=(wish["parent"],), daemon=True).start()
try:
    for pause in [*wish["pauses"], None]:
        try:
            snapshot_download(wish["repo"], revision=wish["revision"], local_dir=wish["folder"],
                              ignore_patterns=wish["ignore"], max_workers=wish["streams"])
            break
        except Exception as error:
            # What its own five attempts at a file did not overcome: the network, not an answer of the hub.
            if pause is None or not type(error).__module__.startswith("httpx"):
                raise
            time.sleep(pause)
    print(json.dumps({"done": True}))
"""
    + _FAILED
)

UNREACHABLE = "found no way to the hub, expected one: set a proxy or a mirror in model_environment, or model_source"
GATED = "found it gated, expected access: accept its terms with your account and set model_token to that account's"

REMEDIES = {
    "RevisionNotFoundError": "found no such commit, expected one of the repository in model_revision: see its history",
    "GatedRepoError": GATED,
    "RepositoryNotFoundError": (
        "found no such repository for this token, expected one that it may read: check model_repo and model_token"
    ),
    "RemoteEntryNotFoundError": (
        "found a listed file missing, expected it at this commit: run again, or choose another model_revision"
    ),
    **dict.fromkeys(("ConnectError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError"), UNREACHABLE),
    "OfflineModeIsEnabled": (
        "found the hub's client told to be offline, expected a download: remove HF_HUB_OFFLINE from model_environment"
    ),
}
"""What is wrong and what mends it, by the exceptions of huggingface_hub."""

STATUSES = {
    401: "found the token unknown to the hub, expected a valid one: check model_token",
    403: GATED,
    429: "found the hub's rate limit reached, expected to be served: wait a while, or set model_token",
}
"""The same by HTTP status, where the exception does not say."""

ELSE = "run again: the download goes on where it stopped"


def listing(place: Place, repo: str, token: str, ignore: list[str], python: str) -> dict[str, Any]:
    """Return ``size`` and ``weights`` in bytes and the ``config`` values that count of a repository, before any weight
    is fetched.

    Raises:
        ModelError: the hub refuses or cannot be reached, or the repository is no complete model.
    """
    found = _list(place, repo, token, ignore, python)
    sizes = {path: int(size or 0) for path, (size, _) in found["files"].items()}
    return {"size": sum(sizes.values()), "weights": weight_bytes(sizes), "config": facts(found["config"])}


def _list(place: Place, repo: str, token: str, ignore: list[str], python: str) -> dict[str, Any]:
    wish = {"repo": repo, "revision": place.revision, "ignore": ignore}
    found = _run(python, _LIST, wish, token)
    require_whole(f"{repo} at {place.revision}", set(found["files"]), found["indexes"])
    return found


def download(
    place: Place, repo: str, token: str, ignore: list[str], python: str, streams: int, say: Progress
) -> Manifest:
    """Download ``repo`` at the place's revision into its place. Return its manifest.

    An interrupted download is gone on with. Sizes and, for large files, sha256 are compared with the hub's.

    Raises:
        ModelError: the hub refuses, cannot be reached, or the files differ from what it lists; no space.
    """
    expected = _list(place, repo, token, ignore, python)["files"]
    size = sum(int(entry[0] or 0) for entry in expected.values())
    # What the client was fetching when it was killed is of no use to the next one.
    for half in place.partial.glob(".cache/**/*.incomplete"):
        half.unlink()
    require_space(place.root, max(0, size - present_bytes(place)))
    reopen(place)
    say(f"downloading {len(expected)} files, {size / 1e9:.2f} GB, of {repo} at {place.revision}")
    wish = {"repo": repo, "revision": place.revision, "ignore": ignore, "streams": streams}
    wish |= {"folder": str(place.partial), "parent": os.getpid(), "pauses": PAUSES}
    _run(
        python, _DOWNLOAD, wish, token,
        lambda: say(f"downloading, {present_bytes(place) / 1e9:.2f} of {size / 1e9:.2f} GB are here"),
    )  # fmt: skip
    shutil.rmtree(place.partial / ".cache", ignore_errors=True)
    files = hash_folder(place.partial, say)
    found = {f.path: f for f in files}
    if wrong := [path for path, entry in expected.items() if path not in found or not _is(found[path], *entry)]:
        for path in wrong:
            (place.partial / path).unlink(missing_ok=True)
        raise ModelError(
            f"{repo} at {place.revision}: found {len(wrong)} file(s) other than the hub lists, first {wrong[0]} "
            f"({_shown(found.get(wrong[0]))}), expected sha256 {expected[wrong[0]][1] or 'none'}, "
            f"{expected[wrong[0]][0]} bytes; removed, run again: they alone are fetched"
        )
    require_usable(place.partial, found)
    manifest = Manifest(files, f"{repo}@{place.revision}")
    finish(place, manifest)
    return manifest


def _is(file: File, size: int | None, sha256: str) -> bool:
    return (size is None or file.size == size) and (not sha256 or file.sha256 == sha256)


def _shown(file: File | None) -> str:
    return f"sha256 {file.sha256}, {file.size} bytes" if file else "missing"


def _run(
    python: str, script: str, wish: dict[str, Any], token: str, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run a script in the environment's Python. Return the JSON object that it printed last.

    Raises:
        ModelError: it failed, with the remedy for what the hub said.
    """
    with tempfile.TemporaryDirectory() as home:
        environment = {
            # Its other way of transfer was reported to stall at 98 %, and has no time-out of its own.
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
            "HF_HUB_ETAG_TIMEOUT": "30",
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            "HF_HOME": home,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "" if token else "1",
            **({"HF_TOKEN": token} if token else {}),
        }
        command = [python, "-I", "-c", script, json.dumps(wish)]
        try:
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home
            ) as process:
                out, err = _wait(process, beat)
        except OSError as error:
            raise ModelError(f"{python} does not run ({error}); run playbooks/vllm_env.yml first") from error
    try:
        answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = (err or out).strip().splitlines()[-1:]
        raise ModelError(f"huggingface_hub ended with {process.returncode}: {''.join(said)[:300]}; {ELSE}") from error
    if "error" in answer:
        remedy = REMEDIES.get(answer["error"]) or STATUSES.get(answer.get("status", 0), ELSE)
        text = " ".join(str(answer["text"]).split())[:200]
        text = text.replace(token, "<model_token>") if token else text
        raise ModelError(f"{wish['repo']} at {wish['revision']}: {remedy} ({answer['error']}: {text})")
    return answer


def _wait(process: subprocess.Popen[str], beat: Callable[[], None]) -> tuple[str, str]:
    """Return what a process wrote when it has ended; call ``beat`` meanwhile."""
    try:
        while True:
            try:
                return process.communicate(timeout=BEAT)
            except subprocess.TimeoutExpired:
                beat()
    finally:
        process.kill()
