"""The gate before every start: whatever a hand changed in an environment is seen and named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from sparkpair_rank import core, digests, environment, main

SITE = "lib/python3.12/site-packages"
SCHED = f"{SITE}/{digests.SCHEDULER}"


@pytest.fixture
def env(tmp_path):
    """A small environment as it was installed, in service under `tmp_path`."""
    folder = tmp_path / "envs" / "0123456789abcdef"
    texts = {
        f"{SITE}/torch/__init__.py": "version = '2'",
        f"{SITE}/torch-2.dist-info/METADATA": "Name: torch",
        f"{SITE}/torch.py": "sorted between its neighbours",
        f"{SCHED}/scheduler.py": "stock",
        f"{SCHED}/interface.py": "stock",
        "bin/vllm": "#!/bin/sh",
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "bin/python").symlink_to("/usr/bin/python3")
    count, content = environment.record(folder)
    assert count == 7
    manifest = {"content": content, "packages": {"torch": "2", "vllm": "1"}}
    (folder / environment.MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "current").symlink_to("envs/0123456789abcdef")
    return folder


def test_an_untouched_environment_has_no_damage(env):
    assert environment.find_damage(env) == ""
    (env / SITE / "torch/__pycache__").mkdir()
    (env / SITE / "torch/__pycache__/x.pyc").touch()
    (env / "hotfix-proof-0123456789abcdef.json").touch()
    assert environment.find_damage(env) == ""


def change_keeping_size(env):
    (env / SITE / "torch/__init__.py").write_text("version = '3'")


def change_keeping_size_and_time(env):
    path = env / SITE / "torch/__init__.py"
    times = path.stat()
    path.with_suffix(".new").write_text("version = '3'")
    path.with_suffix(".new").replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def install_by_hand(env):
    for name in ("six.py", "six-1.17.0.dist-info/METADATA", "six-1.17.0.dist-info/RECORD"):
        (env / SITE / name).parent.mkdir(exist_ok=True)
        (env / SITE / name).touch()


def other_interpreter(env):
    (env / "bin/python").unlink()
    (env / "bin/python").symlink_to("/usr/local/bin/python3")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (change_keeping_size, "found 1 files that differ from what was installed: changed torch/__init__.py"),
        (change_keeping_size_and_time, "changed torch/__init__.py"),
        (install_by_hand, "found 3 files that differ from what was installed: package six 1.17.0 added, "),
        (lambda env: (env / SITE / "torch.py").unlink(), "missing torch.py"),
        (lambda env: shutil.rmtree(env / SITE / "torch-2.dist-info"), "package torch 2 missing"),
        (other_interpreter, "changed bin/python"),
        (lambda env: (env / SCHED / "interface.py").write_text("drift"), f"changed {digests.SCHEDULER}/interface.py"),
        (lambda env: (env / environment.FILES).unlink(), "cannot read"),
        (lambda env: (env / environment.FILES).write_text("nonsense\n"), "cannot read"),
    ],
)
def test_what_a_hand_changed_is_named(env, act, words):
    act(env)
    assert words in environment.find_damage(env)


def test_the_same_bytes_are_no_damage_whenever_they_were_written(env):
    for path in (env / SITE).rglob("*.py"):
        text = path.read_text()
        path.unlink()
        path.write_text(text)
    assert environment.find_damage(env) == ""


def test_the_hotfix_is_accounted_for_by_its_backup_and_its_digest(env, tmp_path):
    before = digests.read_digests(tmp_path, tmp_path / "model")
    scheduler = env / SCHED / "scheduler.py"
    sha = hashlib.sha256(b"stock").hexdigest()
    scheduler.write_text("patched")
    assert "changed vllm/v1/core/sched/scheduler.py" in environment.find_damage(env)
    scheduler.with_name(f"scheduler.py.{sha[:16]}.orig").write_text("stock")
    (env / SCHED / "dspark_prefill.py").write_text("module")
    assert environment.find_damage(env) == ""
    after = digests.read_digests(tmp_path, tmp_path / "model")
    assert {key for key in after if after[key] != before[key]} == {"scheduler"}


def served(tmp_path, monkeypatch, written=None):
    monkeypatch.delenv("SPARKPAIR_SERVES", raising=False)
    if written:
        monkeypatch.setenv("SPARKPAIR_SERVES", written)
    return main.read_served({"root": str(tmp_path), "model": str(tmp_path / "model")})


def test_an_agent_refuses_a_damaged_environment_and_one_that_its_settings_were_not_written_for(
    env, tmp_path, monkeypatch
):
    found = served(tmp_path, monkeypatch)
    assert core.UNFIT not in found
    assert found["packages"] == "torch 2, vllm 1" and "glibc" in found["python"]
    serves = digests.serves(found)
    assert core.UNFIT not in served(tmp_path, monkeypatch, serves)
    assert (
        f"found environment and scheduler {serves}, expected other-one"
        in served(tmp_path, monkeypatch, "other-one")[core.UNFIT]
    )
    install_by_hand(env)
    assert "package six 1.17.0 added" in served(tmp_path, monkeypatch, serves)[core.UNFIT]


def test_a_library_of_the_same_name_and_size_is_another_one(tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"one")
    first = digests.read_nccl(tmp_path, str(library))
    assert first == f"{library}:{hashlib.sha256(b'one').hexdigest()[:12]}"
    times = library.stat()
    library.write_bytes(b"two")
    os.utime(library, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests.read_nccl(tmp_path, str(library)) != first
    library.unlink()
    assert digests.read_nccl(tmp_path, str(library)).endswith("missing")
