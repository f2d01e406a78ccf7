"""The real scheduler classes with the hooks, made in memory: the environment that holds vLLM stays as it is."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "patches"))

import patcher  # noqa: E402
import proof  # noqa: E402

RUNTIME = (ROOT / "patches/dspark_prefill.py").read_text(encoding="utf-8")


def original(path: str) -> bytes:
    """Source of the installed scheduler without our hooks."""
    source = Path(path).read_bytes()
    return patcher.unpatch(source) if patcher.MARK.search(source) else source


def classes(source: bytes, stock: Any, stock_async: Any) -> dict[bool, Any]:
    """Scheduler and AsyncScheduler made from ``source`` in place of that of the module ``stock``."""
    module = types.ModuleType(stock.__name__)
    module.__file__, module.__package__ = stock.__file__, stock.__package__
    exec(compile(source, stock.__file__, "exec"), module.__dict__)
    wrapper = types.ModuleType(stock_async.__name__)
    wrapper.__package__ = stock_async.__package__
    text = Path(stock_async.__file__).read_text(encoding="utf-8")
    line = "from vllm.v1.core.sched.scheduler import Scheduler\n"
    assert line in text
    wrapper.__dict__["Scheduler"] = module.Scheduler
    exec(compile(text.replace(line, "\n"), stock_async.__file__, "exec"), wrapper.__dict__)
    return {False: module.Scheduler, True: wrapper.AsyncScheduler}


def make_rig(*, hooks: bool = True) -> proof.Rig:
    """A rig whose classes carry the hooks of this checkout, or none."""
    rig = proof.Rig()
    from vllm.v1.core.sched import async_scheduler, scheduler

    source = original(scheduler.__file__)
    if hooks:
        runtime = types.ModuleType("vllm.v1.core.sched.dspark_prefill")
        exec(compile(RUNTIME, "dspark_prefill.py", "exec"), runtime.__dict__)
        sys.modules[runtime.__name__] = runtime
        rig.runtime = runtime  # type: ignore[attr-defined]
        source = patcher.patch(source, runtime.REVISION)
    rig.classes = classes(source, scheduler, async_scheduler)
    return rig


@pytest.fixture(scope="session")
def rig() -> proof.Rig:
    return make_rig()


@pytest.fixture(scope="session")
def stock() -> proof.Rig:
    return make_rig(hooks=False)
