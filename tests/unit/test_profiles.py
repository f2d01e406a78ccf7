"""Profiles: what each must say, that they pass, and that Ansible reads them above the inventory and below -e."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml
from ansible.module_utils.sparkpair import inventory
from ansible.module_utils.sparkpair.profile import check
from conftest import ROOT
from inventory_check import load_specs

SPECS = load_specs(ROOT / "roles")
HELPERS = {"none", "unknown"}
PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yml") if path.stem not in HELPERS)


def load(name):
    return yaml.safe_load((ROOT / "profiles" / f"{name}.yml").read_text())


def test_the_profiles_that_were_promised_are_there():
    assert {"deepseek-v4-flash-0731", "qwen3-4b", "tiny"} < set(PROFILES)
    assert any("nvfp4" in name for name in PROFILES)
    assert [name for name in PROFILES if load(name)["profile_evidence"] == "verified in lab"] == ["tiny"]


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_says_what_it_must(name):
    profile = load(name)
    assert check(name, profile, SPECS) == []
    assert profile["model_name"] == name, "what is asked for is what clients ask for"
    settings = {"vllm_env_lock": "x.txt"} | {k: v for k, v in profile.items() if not k.startswith("profile_")}
    if not profile["model_source"]:
        assert re.fullmatch(r"[0-9a-f]{40}", profile["model_revision"])
    assert inventory.check("a", ["a", "b"], settings, SPECS, ["10.0.0.1", "10.0.0.2"])[0] == []


def test_a_profile_without_a_commit_is_refused_until_one_is_given():
    profile = load("deepseek-v4-flash-0731") | {"vllm_env_lock": "x.txt", "model_revision": ""}
    settings = {k: v for k, v in profile.items() if not k.startswith("profile_")}
    (fault,) = inventory.check("a", ["a", "b"], settings, SPECS, ["10.0.0.1", "10.0.0.2"])[0]
    assert "found model_revision='', expected the commit of model_repo" in fault and "-e model_revision=" in fault


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"profile_evidence": "trust me"}, "profile_evidence must be one of: from public report, verified in lab"),
        ({"profile_sources": []}, "found no source in profile_sources of profiles/x.yml"),
        ({"profile_text": None}, "missing required arguments: profile_text"),
        ({"model_name": None}, "found no model_name in profiles/x.yml, expected it"),
        ({"model_revision": None}, "found no model_revision in profiles/x.yml"),
        (
            {"fabric_mtu": 1500},
            "found fabric_mtu in profiles/x.yml, expected variables that begin with model_ or serve_",
        ),
        ({"serve_max_inflight_prefils": 2}, "found serve_max_inflight_prefils in profiles/x.yml"),
        ({"serve_max_inflight_prefills": 9}, "serve_max_inflight_prefills must be one of: 1, 2, 3"),
        ({"serve_engine_args": "--fast"}, "serve_engine_args"),
        ({"model_token": "hf_x"}, "found a secret in profiles/x.yml, expected it in a vault"),
    ],
)
def test_a_profile_that_says_less_or_more_is_refused(change, fault):
    content = {k: v for k, v in (load("qwen3-4b") | change).items() if v is not None}
    assert any(fault in found for found in check("x", content, SPECS)), check("x", content, SPECS)


@pytest.mark.parametrize("content", [None, [], "text"])
def test_a_file_that_is_no_profile_is_refused(content):
    assert "expected variables" in check("x", content, SPECS)[0]


PLAY = """
- hosts: spark-a
  gather_facts: false
  {vars_files}
  tasks:
    - ansible.builtin.debug:
        msg: "model={{{{ model_name }}}} length={{{{ serve_engine_args['max-model-len'] }}}}"
"""


def ask(tmp_path, *arguments, **settings):
    """What a play with the line of the project's plays sees; returns (status, output)."""
    (tmp_path / "playbooks").mkdir(exist_ok=True)
    line = next(x for x in (ROOT / "playbooks" / "model.yml").read_text().splitlines() if "vars_files" in x)
    (tmp_path / "playbooks" / "model.yml").write_text(PLAY.format(vars_files=line.strip()))
    (tmp_path / "site.yml").write_text("- ansible.builtin.import_playbook: playbooks/model.yml\n")
    if not (tmp_path / "profiles").exists():
        (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    values = {"model_name": "mine", "serve_engine_args": {"max-model-len": 7}} | settings
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": {"spark-a": host}, "vars": values}}))
    command = ["ansible-playbook", "-i", "hosts.yml", *arguments]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "seen"),
    [
        (["site.yml"], {}, "model=mine length=7"),
        (["site.yml", "-e", "profile=none"], {"profile": "qwen3-4b"}, "model=mine length=7"),
        (["site.yml", "-e", "profile=qwen3-4b"], {}, "model=qwen3-4b length=32768"),
        (["playbooks/model.yml", "-e", "profile=qwen3-4b"], {}, "model=qwen3-4b length=32768"),
        (["site.yml"], {"profile": "qwen3-4b"}, "model=qwen3-4b length=32768"),
        (["site.yml", "-e", "profile=qwen3-4b"], {"profile": "tiny"}, "model=qwen3-4b length=32768"),
        (["site.yml", "-e", "profile=qwen3-4b", "-e", "model_name=other"], {}, "model=other length=32768"),
    ],
)
def test_a_profile_stands_above_the_inventory_and_below_the_command_line(tmp_path, arguments, settings, seen):
    status, output = ask(tmp_path, *arguments, **settings)
    assert status == 0 and seen in output, output


@pytest.mark.parametrize("playbook", ["site.yml", "playbooks/model.yml"])
def test_a_profile_that_is_not_there_is_refused_with_those_that_are(tmp_path, playbook):
    status, output = ask(tmp_path, playbook, "-e", "profile=qwen3-5b")
    assert status != 0
    assert f"found profile=qwen3-5b, expected one of {', '.join(PROFILES)}" in output


@pytest.mark.parametrize("path", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda path: path.stem)
def test_every_play_reads_the_profile(path):
    plays = [play for play in yaml.safe_load(path.read_text()) if "hosts" in play]
    line = ["../profiles/{{ profile | default('none', true) }}.yml", "../profiles/unknown.yml"]
    assert all(play["vars_files"] == [line] for play in plays)
