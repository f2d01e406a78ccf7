"""Download a pinned revision with the huggingface_hub of the node's vLLM environment.

The hub's client is no part of Ansible, so it runs in the environment's own Python. Everything secret goes
to it by environment variable, everything else as one JSON argument; it answers with JSON lines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from ansible.module_utils.sparkpair.model import (
    Manifest,
    ModelError,
    Place,
    Progress,
    finish,
    hash_folder,
    reopen,
    require_space,
    require_usable,
)

_LIST = """
import fnmatch, json, sys
from huggingface_hub import HfApi
wish = json.loads(sys.argv[1])
try:
    info = HfApi().model_info(wish["repo"], revision=wish["revision"], files_metadata=True)
    files = [s for s in info.siblings if not any(fnmatch.fnmatch(s.rfilename, p) for p in wish["ignore"])]
    print(json.dumps({"files": {s.rfilename: [s.size, s.lfs.sha256 if s.lfs else ""] for s in files}}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""

_DOWNLOAD = """
import json, sys
from huggingface_hub import snapshot_download
wish = json.loads(sys.argv[1])
try:
    snapshot_download(wish["repo"], revision=wish["revision"], local_dir=wish["folder"],
                      ignore_patterns=wish["ignore"], max_workers=wish["streams"])
    print(json.dumps({"done": True}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""

REMEDIES = {
    "RevisionNotFoundError": "there is no such commit; set model_revision to one of the repository",
    "GatedRepoError": "the repository is gated; accept its terms with your account and set model_token",
    "RepositoryNotFoundError": "there is no such repository for this token; check model_repo and model_token",
    **dict.fromkeys(
        ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError"),
        "the hub cannot be reached; set a proxy in model_environment, or model_source",
    ),
    "OfflineModeIsEnabled": "the hub's client is told to be offline; remove HF_HUB_OFFLINE from model_environment",
}


def download(
    place: Place, repo: str, token: str, ignore: list[str], python: str, streams: int, say: Progress
) -> Manifest:
    """Download ``repo`` at the place's revision into its place. Return its manifest.

    An interrupted download is gone on with. Sizes and, for large files, sha256 are compared with the hub's.

    Raises:
        ModelError: the hub refuses, cannot be reached, or the files differ from what it lists; no space.
    """
    wish: dict[str, Any] = {"repo": repo, "revision": place.revision, "ignore": ignore, "streams": streams}
    wish["folder"] = str(place.partial)
    reopen(place)
    expected: dict[str, list[Any]] = _run(python, _LIST, wish, token, place)["files"]
    require_usable_list(repo, expected)
    present = sum(p.stat().st_size for p in place.partial.rglob("*") if p.is_file())
    size = sum(int(entry[0] or 0) for entry in expected.values())
    require_space(place.root, size, min(present, size))
    say(f"downloading {len(expected)} files, {size / 1e9:.2f} GB, of {repo} at {place.revision}")
    _run(python, _DOWNLOAD, wish, token, place)
    shutil.rmtree(place.partial / ".cache", ignore_errors=True)
    files = hash_folder(place.partial, say)
    found = {f.path: f for f in files}
    for path, (length, sha256) in expected.items():
        file = found.get(path)
        if file is None or (length is not None and file.size != length) or (sha256 and file.sha256 != sha256):
            (place.partial / path).unlink(missing_ok=True)
            raise ModelError(f"{path} of {repo} is not what the hub lists; it was removed, run again to fetch it alone")
    require_usable(place.partial, found)
    manifest = Manifest(files, f"{repo}@{place.revision}")
    finish(place, manifest)
    return manifest


def require_usable_list(repo: str, names: dict[str, Any]) -> None:
    """Check that a repository looks like a model before gigabytes are fetched.

    Raises:
        ModelError: it has no config.json.
    """
    if "config.json" not in names:
        raise ModelError(
            f"{repo} has no config.json among its {len(names)} files, so it is not a model that vLLM serves"
        )


def _run(python: str, script: str, wish: dict[str, Any], token: str, place: Place) -> dict[str, Any]:
    """Run a script in the environment's Python. Return the JSON object that it printed last.

    Raises:
        ModelError: it failed, with the remedy for what the hub said.
    """
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        "HF_HOME": str(place.root / ".hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "" if token else "1",
        **({"HF_TOKEN": token} if token else {}),
    }
    command = [python, "-I", "-c", script, json.dumps(wish)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=place.root)
    except OSError as error:
        raise ModelError(f"{python} does not run ({error}); run playbooks/vllm_env.yml first") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ModelError(f"huggingface_hub ended with {done.returncode}: {''.join(said)[:300]}") from error
    if "error" in answer:
        remedy = REMEDIES.get(answer["error"], "run again; the download goes on where it stopped")
        text = " ".join(str(answer["text"]).split())[:200]
        raise ModelError(f"{wish['repo']} at {wish['revision']}: {remedy} ({answer['error']}: {text})")
    return answer
