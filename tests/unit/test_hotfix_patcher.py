"""The patcher on sources of our own: what fits is patched and restored to the byte, what does not is left alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import hotfix_patcher as patcher

from tests.unit.hotfix_fixture import ROOT, RUNTIME, SYNTHETIC_WITH_CAP, TOY, install


@pytest.fixture
def site(tmp_path):
    return tmp_path / "venv/lib/python3.11/site-packages"


def at(site: Path) -> patcher.Installation:
    return patcher.Installation(site, RUNTIME)


def tree(site: Path) -> dict[str, bytes]:
    return {str(p.relative_to(site)): p.read_bytes() for p in sorted(site.rglob("*")) if p.is_file()}


def test_apply_status_revert_is_byte_identical(site):
    path = install(site)
    before = tree(site)
    assert at(site).report().status == patcher.ORIGINAL
    change = at(site).apply()
    assert (change.changed, change.report.status) == (True, patcher.PATCHED)
    assert (path.parent / "dspark_prefill.py").read_text() == RUNTIME
    backup = path.parent / f"scheduler.py.{patcher.sha256(TOY.encode())[:16]}.orig"
    assert backup.read_bytes() == TOY.encode()
    assert at(site).apply().changed is False
    assert at(site).revert().changed is True
    assert tree(site) == before
    assert at(site).revert().changed is False


def test_the_hooks_are_all_there_and_nothing_else_changed():
    patched = patcher.patch(TOY.encode(), 7)
    assert patcher.unpatch(patched) == TOY.encode()
    text = patched.decode()
    for call in ("begin", "clip", "before_lookup", "chunk", "after_lookup", "end"):
        assert len(re.findall(rf"_dspark(?:_gate)?\.{call}\(", text)) == 1, call
    assert text.count("skipped.insert(0, request)") == 3, "the scheduler's own way to skip, copied twice"
    assert text.count("request.encoder = None") == 2, "and what it undoes without blocks, once"
    compile(text, "scheduler.py", "exec")


def test_mode_owner_and_bytecode(site):
    path = install(site)
    path.chmod(0o640)
    stale = path.parent / "__pycache__/scheduler.cpython-311.pyc"
    stale.parent.mkdir()
    other = stale.with_name("other.cpython-311.pyc")
    for p in (stale, other):
        p.write_bytes(b"x")
    at(site).apply()
    assert path.stat().st_mode & 0o777 == 0o640
    assert (path.parent / "dspark_prefill.py").stat().st_mode & 0o777 == 0o640
    assert not stale.exists() and other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_keeps_another_owner(site):
    path = install(site)
    os.chown(path, 12345, 12346)
    at(site).apply()
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_linked_file_is_replaced_and_its_other_name_left_alone(site, tmp_path, link):
    path = install(site)
    cache = tmp_path / "cache.py"
    path.rename(cache)
    link(cache, path)
    at(site).apply()
    assert cache.read_bytes() == TOY.encode()
    assert not path.is_symlink()
    assert at(site).report().status == patcher.PATCHED


def changed(old: str, new: str, count: int = -1) -> str:
    assert old in TOY, old
    return TOY.replace(old, new, count)


MUTATIONS = {
    "CRLF": TOY.replace("\n", "\r\n"),
    "BOM": "\ufeff" + TOY,
    "tabs": TOY.replace("        ", "\t"),
    "does not parse": TOY.replace("def schedule(self):", "def schedule(self:"),
    "class renamed": changed("class Scheduler:", "class Planner:").replace("return Scheduler", "return Planner"),
    "class twice": TOY + "\n\nclass Scheduler:\n    pass\n",
    "method renamed": changed("def schedule(", "def plan("),
    "budget renamed": TOY.replace("token_budget", "budget_left"),
    "chunk renamed": TOY.replace("num_new_tokens", "chunk"),
    "request renamed": TOY.replace("request = self.waiting", "req = self.waiting"),
    "dict renamed": TOY.replace("num_scheduled_tokens", "scheduled"),
    "no load flag": TOY.replace("            load_kv_async = False\n", "").replace("not load_kv_async", "True"),
    "guard removed": changed(
        "            if len(self.running) >= self.max_num_running_reqs:\n                break\n", ""
    ),
    "guard does more": changed("max_num_running_reqs:\n", "max_num_running_reqs:\n                print()\n"),
    "loop duplicated": changed(
        "        skipped = []\n",
        "        while self.waiting and token_budget > 0:\n"
        "            if len(self.running) >= self.max_num_running_reqs:\n"
        "                break\n"
        "            self.waiting.pop()\n"
        "        skipped = []\n",
    ),
    "chunk twice": changed(
        "                assert num_new_tokens > 0\n",
        "                num_new_tokens = min(num_new_tokens, token_budget)\n",
    ),
    "no skip of a LoRA": changed("                self.lora_config\n", "                self.adapters\n"),
    "skip ends otherwise": changed(
        "insert(0, request)\n                continue", "insert(0, request)\n                break"
    ),
    "allocation elsewhere": changed("allocate_slots(", "reserve("),
    "no way out without blocks": changed("if new_blocks is None:", "if not new_blocks:"),
    "returns twice": changed(
        "        token_budget = self.budget\n",
        "        token_budget = self.budget\n        if not token_budget:\n            return {}\n",
    ),
    "return in a branch": changed(
        "        return num_scheduled_tokens", "        if token_budget:\n            return num_scheduled_tokens"
    ),
    "empty": "",
    "nonsense": "\0",
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_does_not_fit_is_refused_and_left_alone(site, name):
    install(site, MUTATIONS[name])
    before = tree(site)
    report = at(site).report()
    assert report.status == patcher.UNSUPPORTED and report.detail
    for verb in (at(site).apply, lambda: at(site).apply(dry_run=True)):
        with pytest.raises(patcher.Refused) as refusal:
            verb()
        assert refusal.value.status == patcher.UNSUPPORTED
    assert tree(site) == before


@pytest.mark.parametrize(
    "line",
    [
        "# [issue27-hotfix] enforce max_num_partial_prefills on admission",
        "# [issue43-hotfix]",
        "# [issue80-scheduler-current-v2]",
        "self._dspark_max_inflight_prefills = 1",
    ],
)
def test_foreign_patches_are_recognised(site, line):
    install(
        site, changed("        self.max_model_len = 10_000\n", f"        self.max_model_len = 10_000\n        {line}\n")
    )
    before = tree(site)
    assert at(site).report().status == patcher.FOREIGN_PATCH
    for verb in (at(site).apply, at(site).revert):
        with pytest.raises(patcher.Refused, match=r"reinstall vLLM .*vllm_env_rebuild=true"):
            verb()
    assert tree(site) == before


def test_steps_aside_where_the_scheduler_enforces_a_cap_itself(site):
    install(site, SYNTHETIC_WITH_CAP)
    before = tree(site)
    assert at(site).report().status == patcher.NOT_NEEDED
    with pytest.raises(patcher.Refused, match="vLLM's own option"):
        at(site).apply()
    assert tree(site) == before


OLDER = re.sub(r"^REVISION = \d+$", "REVISION = 0", RUNTIME, flags=re.MULTILINE) + "\n# older\n"


def test_an_older_revision_is_replaced(site):
    path = install(site)
    patcher.Installation(site, OLDER).apply()
    report = at(site).report()
    assert (report.status, report.revision) == (patcher.OLDER, 0)
    at(site).apply()
    assert at(site).report().status == patcher.PATCHED
    at(site).revert()
    assert path.read_bytes() == TOY.encode()


def test_hooks_changed_by_hand_are_refused_until_the_backup_is_asked_for(site):
    path = install(site)
    at(site).apply()
    path.write_text(path.read_text().replace("self.max_num_running_reqs = 8", "self.max_num_running_reqs = 9"))
    assert at(site).report().status == patcher.UNSUPPORTED
    with pytest.raises(patcher.Refused, match="by hand"):
        at(site).apply()
    at(site).revert()
    assert path.read_bytes() == TOY.encode()


def test_reverts_without_a_backup(site):
    path = install(site)
    at(site).apply()
    for backup in path.parent.glob("*.orig"):
        backup.write_bytes(b"something else")
    at(site).revert()
    assert path.read_bytes() == TOY.encode()
    assert sorted(p.name for p in path.parent.iterdir()) == ["scheduler.py"]


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_interrupted_anywhere_it_leaves_a_scheduler_that_runs(site, monkeypatch, verb):
    path = install(site)
    if verb == "revert":
        at(site).apply()
    whole = {TOY.encode(), patcher.patch(TOY.encode(), at(site).revision)}
    real = patcher.Path.replace
    for stop_at in range(1, 4):
        calls = 0

        def interrupted(self, target, stop_at=stop_at):
            nonlocal calls
            calls += 1
            if calls >= stop_at:
                raise KeyboardInterrupt
            return real(self, target)

        monkeypatch.setattr(patcher.Path, "replace", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            getattr(at(site), verb)()
        monkeypatch.setattr(patcher.Path, "replace", real)
        assert path.read_bytes() in whole
        if path.read_bytes() != TOY.encode():
            assert (path.parent / "dspark_prefill.py").is_file(), "hooks that import what is not there"
        assert not list(path.parent.glob(".dspark-*"))
    getattr(at(site), verb)()
    assert at(site).report().status == (patcher.PATCHED if verb == "apply" else patcher.ORIGINAL)


KILLED = """
import os, sys
import patcher
left = int(sys.argv[1])
def dying(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*args, **kwargs)
    return call
os.fsync, patcher.Path.replace, patcher.Path.unlink = map(dying, (os.fsync, patcher.Path.replace, patcher.Path.unlink))
getattr(patcher.Installation(patcher.Path(sys.argv[2]), open(patcher.MODULE).read()), sys.argv[3])()
"""


@pytest.mark.parametrize("verb", ["apply", "upgrade", "revert"])
def test_killed_before_any_write_it_leaves_a_scheduler_that_runs_and_the_next_run_ends_it(site, verb):
    path = install(site)
    # What each hooks import.
    needs = {patcher.patch(TOY.encode(), at(site).revision): RUNTIME, patcher.patch(TOY.encode(), 0): OLDER}
    for calls in range(20):
        if verb == "revert":
            at(site).apply()
        else:
            at(site).revert()
        if verb == "upgrade":
            patcher.Installation(site, OLDER).apply()
        command = [sys.executable, "-c", KILLED, str(calls), str(site), "revert" if verb == "revert" else "apply"]
        done = subprocess.run(command, cwd=ROOT / "patches", check=False, capture_output=True, text=True)
        assert done.returncode in (0, 9), done.stderr
        found = path.read_bytes()
        assert found == TOY.encode() or (path.parent / patcher.MODULE).read_text() == needs[found]
        getattr(at(site), "revert" if verb == "revert" else "apply")()
        assert at(site).report().status == (patcher.ORIGINAL if verb == "revert" else patcher.PATCHED)
        assert not list(path.parent.glob(".dspark-*"))
        if done.returncode == 0:
            break
    assert calls >= 3 and done.returncode == 0, "it was killed at each of its steps"


def test_two_at_once(site):
    path = install(site)
    errors = []

    def work(verb):
        try:
            for _ in range(10):
                getattr(at(site), verb)()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(v,)) for v in ("apply", "revert", "apply")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    at(site).revert()
    assert path.read_bytes() == TOY.encode()


def test_read_only_is_a_clear_error(site, monkeypatch):
    path = install(site)

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(patcher.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(patcher.NotWritable, match="run as the owner"):
        at(site).apply()
    assert path.read_bytes() == TOY.encode()


def cli(*args, folder=ROOT / "patches"):
    done = subprocess.run(
        [sys.executable, str(folder / "hotfix.py"), *map(str, args)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_command_line_from_a_copied_folder(site, tmp_path):
    folder = tmp_path / "copied"
    folder.mkdir()
    for name in ("hotfix.py", "patcher.py", "dspark_prefill.py", "proof.py"):
        (folder / name).write_bytes((ROOT / "patches" / name).read_bytes())
    path = install(site)
    venv = site.parent.parent.parent

    def run(*args):
        return cli(*args, "--venv", venv, folder=folder)

    assert run("status")[0] == 10
    code, text = run("diff")
    assert code == 0 and "+        _dspark = self._dspark_gate.begin()" in text and "install" in text
    assert path.read_bytes() == TOY.encode()
    assert run("apply")[0] == 0
    code, text = run("status", "--json")
    assert code == 0 and json.loads(text)["status"] == "patched" and json.loads(text)["vllm_version"] == "0.99.0"
    assert run("revert")[0] == 0
    assert path.read_bytes() == TOY.encode()


def test_command_line_exit_codes(site, tmp_path):
    assert cli("status", "--venv", tmp_path)[0] == 5
    assert cli("apply", "--site-packages", tmp_path)[0] == 5
    assert cli("explode")[0] == 2
    install(site, MUTATIONS["CRLF"])
    assert cli("status", "--site-packages", site)[0] == 3
    code, text = cli("apply", "--site-packages", site, "--json")
    assert code == 3 and json.loads(text)["status"] == "unsupported"
