"""The scheduler hotfix as an Ansible module sees it: `patches/` (linked in beside this file) does the work."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import hotfix_patcher as patcher
from ansible.module_utils.sparkpair import hotfix_runtime

COMMAND = "ansible-playbook playbooks/vllm_env.yml (with -e vllm_env_rebuild=true if it was built and lost files)"


def runtime_text() -> str:
    """Source of the runtime module, also when Ansible carried this package to the node in a zip file."""
    return inspect.getsource(hotfix_runtime)


def read_status(venv: Path) -> str:
    """Status of the scheduler in ``venv`` (the patcher's words), absent where there is no vLLM. Reads only."""
    try:
        status: str = patcher.Installation(patcher.find_site_packages(venv), runtime_text()).report().status
    except patcher.NoVllm:
        status = patcher.ABSENT
    return status


def _shown(path: str, text: str | None) -> str:
    """What a diff shows of a file: the hooks in the scheduler, but only the digest of our module of 450 lines."""
    if text and Path(path).name == patcher.MODULE:
        return f"{text.count(chr(10))} lines, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}\n"
    return text or ""


def converge(venv: str | None, site_packages: str | None, state: str, check_mode: bool) -> dict[str, Any]:
    """Bring one environment to ``state`` (present or absent) and return the module's result, ``diff`` included.

    ``found`` is the report on what was there before; in check mode everything else is a prediction.
    In check mode an environment that an earlier stage has yet to build is predicted, not refused. Raises HotfixError.
    """
    where = site_packages or venv or ""
    try:
        site = Path(site_packages) if site_packages else patcher.find_site_packages(Path(where))
        installation = patcher.Installation(site, runtime_text())
    except patcher.NoVllm as error:
        if not check_mode:
            raise patcher.NoVllm(f"{error}. Build it first: {COMMAND}") from error
        note = f"{where}: no vLLM there yet"
        nothing = {"status": patcher.ABSENT, "detail": note, "digest": "", "vllm_version": ""}
        predicted = {"changed": state == "present", "site_packages": site_packages or "", "diff": []}
        return {**nothing, "found": nothing, **predicted}
    found = installation.report().as_dict()
    act = installation.apply if state == "present" else installation.revert
    try:
        change = act(dry_run=check_mode)
    except patcher.Refused as refusal:
        if refusal.status != patcher.NOT_NEEDED:
            raise
        change = patcher.Change(False, installation.report())  # vLLM enforces a cap itself: step aside
    diff = [
        {"before_header": path, "after_header": path, "before": _shown(path, before), "after": _shown(path, after)}
        for path, before, after in change.files
    ]
    return {"changed": change.changed, "found": found, **change.report.as_dict(), "diff": diff}
