"""What the module ``vllm_env`` does in each of its states, from its arguments to its result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import env, wheels
from ansible.module_utils.sparkpair.env_lock import parse_lock, parse_requirements
from ansible.module_utils.sparkpair.model_task import Log

CACHES = Path("/var/cache/sparkpair-rank")
"""Where the ranks keep what they compile."""


def make_plan(wish: Mapping[str, Any]) -> env.Plan:
    """Return what is to be in place. Raises EnvError and LockError."""
    plan = env.Plan(
        root=Path(wish["root"]),
        lock=parse_lock(wish["lock"]),
        lock_text=wish["lock"],
        uv=parse_requirements(wish["uv_lock"])[0],
        python=env.inspect_python(wish["python"]),
        log=Path(wish["log"]),
    )
    env.require_fit(plan.lock, plan.python)
    for folder in (plan.root, CACHES):
        env.require_local(folder, Path("/proc/mounts").read_text(encoding="utf-8"))
    return plan


def run(wish: Mapping[str, Any], check: bool, warn: Callable[[str], None]) -> dict[str, Any]:
    """Do what ``state`` says. Return the module's result.

    Raises:
        EnvError, LockError, WheelError, ModelError, OSError: what is in the way; what was in use is untouched.
    """
    plan = make_plan(wish)
    act = {"current": _current, "wheels": _wheels, "shared": _shared, "copied": _copied}[wish["state"]]
    result = act(plan, wish, check, warn)
    version = plan.lock.version_of("vllm")
    python = str(plan.path / "bin" / "python")
    return {"digest": plan.digest, "path": str(plan.path), "python": python, "vllm_version": version, **result}


def _current(plan: env.Plan, wish: Mapping[str, Any], check: bool, warn: Callable[[str], None]) -> dict[str, Any]:
    before = env.current_name(plan.root)
    manifest, damage = env.judge(plan.path)
    if damage:
        warn(f"vllm_env: {plan.path} is damaged and built anew: {damage}")
    complete = manifest is not None and not wish["rebuild"]
    changed = not complete or before != plan.digest
    if changed and not check:
        manifest = env.install(plan, wish["rebuild"])
        env.switch(plan)
    old = env.prunable(plan, wish["keep"])
    if old and not check:
        env.prune(plan, wish["keep"])
    gone = "".join(f"{path}\n" for path in old)
    return {
        "changed": changed or bool(old),
        "stale": changed or bool(old),
        "complete": complete,
        "manifest": manifest or {},
        "diff": {"before": f"{before}{', ' + damage if damage else ''}\n{gone}", "after": f"{plan.digest}\n"},
    }


def _wheels(plan: env.Plan, wish: Mapping[str, Any], check: bool, _: Callable[[str], None]) -> dict[str, Any]:
    lacking = wish["rebuild"] or wheels.read(plan.wheels, plan.wanted) is None
    if lacking and not check:
        with _alone(plan):
            if wish["rebuild"]:
                shutil.rmtree(plan.wheels.path, ignore_errors=True)
                shutil.rmtree(plan.wheels.partial, ignore_errors=True)
            folder = Path(wish["wheelhouse"]) if wish["wheelhouse"] else None
            wheels.take(plan.wheels, plan.wanted, folder, plan.lock, plan.python.path, _log(plan).say)
    return {"changed": lacking}


def _shared(plan: env.Plan, wish: Mapping[str, Any], check: bool, _: Callable[[str], None]) -> dict[str, Any]:
    if not check:
        wheels.serve(plan.wheels, wish["address"], wish["port"], wish["secret"], wish["peers"], _log(plan).say)
    return {"changed": False}


def _copied(plan: env.Plan, wish: Mapping[str, Any], check: bool, _: Callable[[str], None]) -> dict[str, Any]:
    lacking = wheels.read(plan.wheels, plan.wanted) is None
    if not check:
        with _alone(plan):
            wheels.copy(plan.wheels, wish["address"], wish["port"], wish["secret"], wish["streams"], _log(plan).say)
    return {"changed": lacking}


def _alone(plan: env.Plan) -> Any:
    os.umask(0o022)
    plan.root.mkdir(parents=True, exist_ok=True)
    return env.only_one(plan.root)


def _log(plan: env.Plan) -> Log:
    """The log of getting the wheels, beside that of the installation."""
    return Log(plan.log.with_name(f"{plan.log.stem}_wheels.log"))
