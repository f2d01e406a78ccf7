"""The `vllm_hotfix` module: prediction, diff, refusal, and the journey of its sources in Ansible's zip file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ansible.module_utils.sparkpair import hotfix
from ansible.module_utils.sparkpair.hotfix_patcher import HotfixError

from tests.unit.hotfix_fixture import ROOT, RUNTIME, SYNTHETIC_WITH_CAP, TOY, install


@pytest.fixture
def venv(tmp_path):
    install(tmp_path / "lib/python3.11/site-packages")
    return tmp_path


def scheduler(venv):
    return venv / "lib/python3.11/site-packages/vllm/v1/core/sched/scheduler.py"


def test_present_and_absent_with_a_truthful_prediction(venv):
    for state, status in (("present", "patched"), ("absent", "original")):
        before = scheduler(venv).read_bytes()
        predicted = hotfix.converge(str(venv), None, state, True)
        assert scheduler(venv).read_bytes() == before
        done = hotfix.converge(str(venv), None, state, False)
        assert predicted["changed"] is done["changed"] is True
        assert predicted["status"] == done["status"] == status
        assert predicted["diff"] == done["diff"] and done["diff"]
        shown = {entry["after_header"].rsplit("/", 1)[-1]: entry["after"] for entry in done["diff"]}
        assert ("dspark" in shown["scheduler.py"]) == (state == "present")
        assert shown["dspark_prefill.py"].count("\n") == (1 if state == "present" else 0)
        assert hotfix.converge(str(venv), None, state, False)["changed"] is False
    assert scheduler(venv).read_bytes() == TOY.encode()


def test_a_symlink_to_the_environment_will_do(venv, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(venv)
    assert hotfix.converge(str(link), None, "present", False)["status"] == "patched"


def test_digest_is_the_code_and_nothing_else(tmp_path):
    digests = set()
    for name in ("a", "b"):
        install(tmp_path / name)
        digests.add(hotfix.converge(None, str(tmp_path / name), "present", False)["digest"])
    assert len(digests) == 1 and len(digests.pop()) == 64


@pytest.mark.parametrize(("state", "changed"), [("present", True), ("absent", False)])
def test_an_environment_to_come_is_predicted_in_check_mode_only(tmp_path, state, changed):
    result = hotfix.converge(str(tmp_path / "none"), None, state, True)
    assert (result["status"], result["changed"]) == ("absent", changed)
    with pytest.raises(HotfixError, match="playbooks/vllm_env"):
        hotfix.converge(str(tmp_path / "none"), None, state, False)


def test_steps_aside_for_upstream(venv):
    scheduler(venv).write_text(SYNTHETIC_WITH_CAP)
    result = hotfix.converge(str(venv), None, "present", False)
    assert (result["status"], result["changed"]) == ("not-needed", False)
    assert hotfix.read_status(venv) == "not-needed"


def test_status_for_the_service(venv, tmp_path):
    assert hotfix.read_status(venv) == "original"
    hotfix.converge(str(venv), None, "present", False)
    assert hotfix.read_status(venv) == "patched"
    assert hotfix.read_status(tmp_path / "none") == "absent"


def test_travels_in_ansibles_zip(venv, tmp_path):
    """Run the module as Ansible does: packed, sent, run by another interpreter."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "all: {hosts: {node: {ansible_connection: local, ansible_python_interpreter: " + sys.executable + "}}}\n"
    )
    config = tmp_path / "ansible.cfg"
    config.touch()
    command = ["ansible", "node", "-i", str(inventory), "-m", "vllm_hotfix", "-a", f"venv={venv}", "-o"]
    environment = {
        "ANSIBLE_LIBRARY": str(ROOT / "library"), "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "ANSIBLE_CONFIG": str(config),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.split("=>", 1)[1])
    assert (result["status"], result["changed"]) == ("patched", True)
    assert (scheduler(venv).parent / "dspark_prefill.py").read_text() == RUNTIME
