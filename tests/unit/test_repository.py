"""The rules that every role, playbook and file of the repository keeps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.sparkpair import memory
from ansible.module_utils.sparkpair.resolve import read_plan
from conftest import ROOT
from sparkpair_rank import core

STAGES = ["preflight", "fabric", "gpu", "accept", "vllm_env", "hotfix", "model", "serve", "verify"]
TASK_LINES = 60


def load(path: Path):
    return yaml.safe_load(path.read_text())


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_site_only_imports_one_playbook_for_each_stage():
    text = (ROOT / "site.yml").read_text()
    assert len(text.splitlines()) <= 25
    plays = load(ROOT / "site.yml")
    assert [play["ansible.builtin.import_playbook"] for play in plays] == [f"playbooks/{stage}.yml" for stage in STAGES]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_one_playbook_with_one_role_and_one_tag(stage):
    (play,) = load(ROOT / "playbooks" / f"{stage}.yml")
    # Nothing is changed on an inventory that was not checked, whatever tags are asked for.
    assert play["roles"] == [{"role": stage, "tags": [stage, "always"] if stage == "preflight" else [stage]}]
    assert play["hosts"] == "sparks" and play["any_errors_fatal"] and play["gather_facts"] is False
    assert "tasks" not in play


@pytest.mark.parametrize("role", STAGES)
def test_spec_and_defaults_are_equal_by_value(role):
    defaults = load(ROOT / "roles" / role / "defaults" / "main.yml") or {}
    spec = load(ROOT / "roles" / role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in spec.items() if "default" in option} == defaults
    assert all(name.startswith(f"{role}_") for name in spec)
    assert all(option.get("required") for option in spec.values() if "default" not in option)


@pytest.mark.parametrize("path", sorted((ROOT / "roles").glob("*/*/*.yml")), ids=lambda path: "/".join(path.parts[-3:]))
def test_task_files_fit_on_a_screen(path):
    if path.parent.name in ("tasks", "handlers"):
        # roles/serve/tasks/main.yml writes five files that belong together; it is the longest there is.
        assert len(path.read_text().splitlines()) <= (90 if path.parts[-3:-1] == ("serve", "tasks") else TASK_LINES)


@pytest.mark.parametrize("path", sorted((ROOT / "library").glob("*.py")), ids=lambda path: path.name)
def test_modules_are_thin(path):
    assert len(path.read_text().splitlines()) < 115
    text = path.read_text()
    assert "supports_check_mode=True" in text and "import subprocess" not in text


@pytest.mark.parametrize("inventory", ["lab", "example"])
@pytest.mark.parametrize("playbook", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda path: path.stem)
def test_playbooks_parse_with_both_inventories(playbook, inventory):
    command = ["ansible-playbook", "--syntax-check", "-i", f"inventory/{inventory}", str(playbook)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("inventory", ["lab", "example"])
def test_inventories_have_two_sparks(inventory):
    command = ["ansible-inventory", "-i", f"inventory/{inventory}", "--graph"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"@sparks:\n.*spark-a\n.*spark-b", shown), shown


# What must never be committed: hosts of package registries, and paths of the machine that wrote it.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"pypi\.o" r"rg",
            r"pythonhosted\.o" r"rg",
            r"deb\.debian\.o" r"rg",
            r"registry\.npmjs",
            r"download\.pytorch\.o" r"rg",
        )
    )
)


def test_no_registry_host_and_no_path_of_a_machine_is_committed():
    here = re.compile(re.escape(str(ROOT)) + r"\b|/root/\.")
    found = []
    for path in tracked():
        if path.is_file() and path.name != "LICENSE":
            text = path.read_text(encoding="utf-8", errors="ignore")
            if FORBIDDEN.search(text) or here.search(text):
                found.append(str(path.relative_to(ROOT)))
    assert found == []


RAILS = [
    {"netdev": "enp1s0f0np0", "hca": "rocep1s0f0", "addresses_by_rank": ["192.168.176.1", "192.168.176.2"]},
    {"netdev": "enP2p1s0f0np0", "hca": "roceP2p1s0f0", "addresses_by_rank": ["192.168.177.1", "192.168.177.2"]},
]


RENDERED = ("rank.env", "sparkpair-rank.service", "engine.yaml", "agent.json", "fabric.json")


def render(rank: int, tmp_path: Path, **settings: object) -> dict[str, str]:
    """The unit and the environment file of one rank, rendered by Ansible as the role does."""
    (tmp_path / "play.yml").write_text(f"""
- hosts: spark-{"ab"[rank]}
  connection: local
  gather_facts: false
  vars_files: [{ROOT}/roles/serve/defaults/main.yml, {ROOT}/roles/serve/vars/main.yml]
  tasks:
    - ansible.builtin.template:
        src: "{ROOT}/templates/{{{{ item }}}}.j2"
        dest: "{tmp_path}/{{{{ item }}}}"
        mode: "0644"
      loop: {json.dumps(RENDERED)}
""")
    read = {
        "model_name": "tiny",
        "fabric_sysfs_root": "/sys",
        "fabric_subnet": "192.168.176.0/23",
        "__serve_read": {
            "digests": {"env": "a", "scheduler": "b", "model": "c"},
            "serves": "a-b",
            "packages": {"libnccl2": "2.28.9-1+cuda13.0"},
        },
        "__fabric_info": {
            "rails": RAILS,
            "environment": {"NCCL_IB_MERGE_NICS": "0"},
            "meeting": {"address": "10.77.0.{{ groups['sparks'].index(inventory_hostname) + 1 }}"},
        },
        "fabric_topology": "pair",
        "ansible_python_interpreter": sys.executable,
        "role_path": str(ROOT / "roles/serve"),
    }
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"sparks": {"hosts": {"spark-a": {}, "spark-b": {}}, "vars": read}})
    )
    (tmp_path / "extra.yml").write_text(yaml.safe_dump(settings))
    command = ["ansible-playbook", "-i", "hosts.yml", "play.yml", "-e", "@extra.yml"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (tmp_path / name).read_text() for name in RENDERED}


def test_both_ranks_render_with_the_cap_and_their_own_addresses(tmp_path):
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        made = render(rank, folder, serve_max_inflight_prefills=3, serve_sched_diag=True)
        assert 'DSPARK_MAX_INFLIGHT_PREFILLS="3"' in made["rank.env"]
        assert 'DSPARK_ISSUE43_SCHED_DIAG="1"' in made["rank.env"]
        assert not any(name in made["rank.env"] for name in ("VLLM_HOST_IP", "IFNAME", "NCCL_IB"))
        plan = read_plan(made["fabric.json"])
        assert plan.host == f"10.77.0.{rank + 1}"
        assert plan.addresses == (f"192.168.176.{rank + 1}", f"192.168.177.{rank + 1}")
        assert plan.nccl == "2.28.9-1+cuda13.0" and plan.environment == {"NCCL_IB_MERGE_NICS": "0"}
        agent = json.loads(made["agent.json"])
        assert agent["command"][2:4] == ["/usr/local/lib/sparkpair/resolve.py", "/etc/sparkpair/fabric.json"]
        command = " ".join(agent["command"])
        assert f"--node-rank {rank}" in command and agent["rank"] == rank
        assert ("--headless" in command) == (rank == 1) and ("--host 127.0.0.1 --port 8000" in command) == (rank == 0)
        assert agent["rails"] == [rail["addresses_by_rank"] for rail in RAILS]
        assert agent["fatal"][1] == "/sys/class/net/enP2p1s0f0np0/device/aer_dev_fatal"
        core.Limits(**agent["limits"])
        assert "fatal-aer" in [entry["id"] for entry in agent["known_bad"]]
        assert yaml.safe_load(made["engine.yaml"])["master-addr"] == "192.168.176.1"
    same = [(tmp_path / str(rank) / "engine.yaml").read_text() for rank in (0, 1)]
    assert same[0] == same[1]


@pytest.mark.parametrize(("status", "state", "option"), [
    ("not-needed", "present", 3), ("not-needed", "absent", None), ("patched", "present", None),
])  # fmt: skip
def test_a_vllm_that_enforces_the_cap_gets_its_own_option_instead_of_our_variables(tmp_path, status, state, option):
    read = {"digests": {"env": "a", "scheduler": "b", "model": "c"}, "packages": {}, "serves": "a-b", "hotfix": status}
    made = render(1, tmp_path, serve_max_inflight_prefills=3, hotfix_state=state, __serve_read=read)
    assert yaml.safe_load(made["engine.yaml"]).get("max-num-partial-prefills") == option
    assert ("DSPARK_" in made["rank.env"]) == (status != "not-needed")


def test_ranks_of_a_ring_meet_at_the_heads_management_address(tmp_path):
    made = render(1, tmp_path, fabric_topology="ring")
    assert yaml.safe_load(made["engine.yaml"])["master-addr"] == "10.77.0.1"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_the_units_are_hardened(tmp_path):
    """At most 3.0 on systemd's scale; each unit says what is left open and why."""
    units = {"sparkpair-rank.service": render(0, tmp_path)["sparkpair-rank.service"]}
    units |= {Path(name).name: text for name, text in memory.page_cache_units("root").items() if ".d/" not in name}
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    services = [str(tmp_path / name) for name in units if name.endswith(".service")]
    for command in (
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", *services],
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "sparkpair-page-cache.socket")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and len(services) == 2, done.stdout + done.stderr


def test_tasks_with_secrets_show_nothing():
    tasks = load(ROOT / "roles/serve/tasks/secrets.yml")
    assert len(tasks) >= 5 and all(task.get("no_log") is True for task in tasks)


def test_no_variable_of_the_service_is_empty(tmp_path):
    made = render(0, tmp_path, serve_environment={"NCCL_DEBUG": "INFO", "QUOTED": 'a "b" \\c'})
    lines = [line for line in made["rank.env"].splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[A-Z_0-9]+=".+"', line) for line in lines)
    assert r'QUOTED="a \"b\" \\c"' in lines
