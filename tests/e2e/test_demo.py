"""From fresh nodes to a streamed token, again without a change, after a reboot, and what is refused.

The tests run in this order on one lab: each stands on what the one before it left. Real vLLM serves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, lab, play, run

pytestmark = pytest.mark.usefixtures("fresh_lab")
MODULE_RUNS = 40
"""Most module runs that a converged run may need for one host; checks of arguments against their spec run no module."""
STAGES = 9
REBOOT_S = 240
"""Longest time from a reboot of both nodes to a served token; 44 s of it is vLLM's own start (measured)."""


def recap(output: str) -> dict[str, dict[str, int]]:
    """The last lines of a run: host to its counts."""
    lines = re.findall(r"^(spark-\w) +: (.*)$", output.split("PLAY RECAP")[-1], re.MULTILINE)
    return {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in lines}


def changed(output: str) -> set[int]:
    return {counts["changed"] for counts in recap(output).values()}


def test_a_check_of_fresh_nodes_passes_and_predicts_changes():
    output = play("site.yml", "--check", "--diff")
    assert min(changed(output)) > 0


def test_a_check_changes_nothing():
    shown = lab("ssh", "spark-a", "ls", "/etc/netplan", "/etc/apt/sources.list.d", "/opt", "/etc/systemd/system")
    assert "sparkpair" not in shown


def test_the_demo_streams_a_completion():
    output = run("make", "demo")
    assert re.search(r"^\[\d+ chunks; the first after", output, re.MULTILINE), output[-3000:]
    assert "sparkpair: serving, proven by a streamed completion" in output
    print(output.splitlines()[-1])


def test_a_second_run_changes_nothing_with_few_module_runs():
    started = time.monotonic()
    output = play("site.yml")
    print(f"converged run: {time.monotonic() - started:.1f} s, {recap(output)}")
    assert changed(output) == {0}
    assert all(counts["ok"] - STAGES <= MODULE_RUNS for counts in recap(output).values()), recap(output)


def test_a_check_of_converged_nodes_predicts_nothing():
    assert changed(play("site.yml", "--check", "--diff")) == {0}


def test_a_second_demo_converges():
    output = run("make", "demo")
    assert changed(output) == {0}


def test_a_change_on_one_node_restarts_the_pair_as_one():
    drift = "path=/etc/sparkpair/engine.yaml line='# drift'"
    run("ansible", "-i", "inventory/lab", "spark-b", "-b", "-m", "ansible.builtin.lineinfile", "-a", drift)
    output = play("playbooks/serve.yml")
    assert min(changed(output)) > 0, recap(output)
    assert "sparkpair: serving" in play("playbooks/verify.yml")


def other_python() -> str | None:
    """A Python with the other supported ansible-core: 3.12 or newer brings 2.21, 3.11 brings 2.19."""
    names = ["python3.13", "python3.12"] if sys.version_info < (3, 12) else ["python3.11"]
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.1[123].*/bin/python3.1[123]"), reverse=True)
    for name in names:
        for candidate in [shutil.which(name), *(str(path) for path in pyenv if path.name == name)]:
            if (
                candidate
                and subprocess.run([candidate, "-c", "import ssl"], capture_output=True, check=False).returncode == 0
            ):
                return candidate
    return None


def test_the_other_ansible_core_agrees():
    python = other_python()
    if python is None:
        pytest.skip("no second Python on this machine: install python3.12 or python3.11 beside this one")
    folder = ROOT / ".cache" / "venv-other"
    if not (folder / ".done").exists():
        run(python, "-m", "venv", "--clear", str(folder))
        run(str(folder / "bin" / "pip"), "install", "--quiet", "-r", "requirements-dev.txt")
        (folder / ".done").touch()
    path = f"{folder}/bin:{os.environ['PATH']}"
    output = play("site.yml", PATH=path)
    print(run("ansible-playbook", "--version", PATH=path).splitlines()[0])
    assert changed(output) == {0}
    assert changed(play("site.yml", "--check", PATH=path)) == {0}


def make_inventory(tmp_path: Path, **hosts: str) -> str:
    """The lab's inventory with other hosts (name to management address)."""
    folder = tmp_path / "inventory"
    shutil.copytree(ROOT / "inventory" / "lab", folder)
    data = yaml.safe_load((folder / "hosts.yml").read_text())
    data["all"]["children"]["sparks"]["hosts"] = {
        name.replace("_", "-"): {"ansible_host": address} for name, address in hosts.items()
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(data))
    return str(folder)


LAB_DIR = os.environ.get("LAB_DIR", str(ROOT / ".lab"))
A, B = "10.77.0.1", "10.77.0.2"


@pytest.mark.parametrize(
    ("hosts", "settings", "words"),
    [
        ({"spark_a": A}, {}, "found 1 host in the group sparks"),
        ({"spark_a": A, "spark_b": B, "spark_c": "10.77.0.3"}, {}, "found 3 hosts in the group sparks"),
        ({}, {"serve_max_inflight_prefils": 2}, "did you mean serve_max_inflight_prefills?"),
        ({}, {"serve_engine_args": {"max_model_len": 1}}, "expected the long name without dashes: max-model-len"),
        ({}, {"serve_max_inflight_prefills": 0}, "serve_max_inflight_prefills"),
        ({}, {"serve_max_inflight_prefills": 4}, "serve_max_inflight_prefills"),
        ({}, {"serve_max_inflight_prefills": "two"}, "serve_max_inflight_prefills"),
        ({}, {"serve_max_inflight_prefills": ""}, "serve_max_inflight_prefills"),
        ({}, {"profile": "huge"}, "found profile=huge, expected one of deepseek-v4-flash-0731"),
        ({}, {"fabric_mtu": 900}, "fabric_mtu 900 is not between"),
        ({}, {"fabric_subnet": "10.77.0.0/23"}, "overlaps"),
        ({}, {"fabric_subnet": "192.168.176.1/23"}, "is an address in a network"),
        ({}, {"fabric_subnet": "rails"}, "is not a network"),
        ({}, {"serve_bind": "everywhere"}, "expected an IP address"),
        ({"spark_a": A, "spark_b": "10.77.0.9"}, {}, "spark-b: found no SSH connection"),
        ({}, {"ansible_become_password": "wrong"}, "--ask-become-pass"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(tmp_path, hosts, settings, words):
    (tmp_path / "extra.yml").write_text(yaml.safe_dump(settings))
    inventory = make_inventory(tmp_path, **(hosts or {"spark_a": A, "spark_b": B}))
    output = play("site.yml", "-e", f"@{tmp_path}/extra.yml", inventory=inventory, check=False, LAB_DIR=LAB_DIR)
    assert words in " ".join(output.split()), output[-3000:]
    assert changed(output) == {0}
    assert "TASK [fabric" not in output, "a later stage ran"
    assert any(counts["failed"] for counts in recap(output).values())


def test_both_nodes_rebooted_serve_again_without_a_hand():
    run("ansible", "-i", "inventory/lab", "sparks", "-b", "-m", "ansible.builtin.reboot", "-a", "reboot_timeout=120")
    started = time.monotonic()
    while "sparkpair: serving" not in (output := play("playbooks/status.yml", check=False)):
        assert time.monotonic() - started < REBOOT_S, output[-3000:]
        time.sleep(3)
    print(f"serving again {time.monotonic() - started:.0f} s after both nodes were up")
    assert changed(play("site.yml")) == {0}


def test_status_names_a_node_that_is_off():
    lab("kill", "spark-b")
    output = play("playbooks/status.yml", check=False)
    assert "NOT PROVEN" in output and re.search(r"spark-b: found .*unreachable", output), output[-3000:]
    lab("start", "spark-b")
