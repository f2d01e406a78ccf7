"""`serve_vault_file`: the made key of an open API in a vault on the controller, by the role's own tasks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAY = """\
- name: The key of an open API
  hosts: spark-a
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {{name: serve, tasks_from: vault}}
    - ansible.builtin.copy: {{content: "{{{{ serve_api_key }}}}", dest: {used}}}
      no_log: true
"""


@pytest.fixture
def run(tmp_path):
    """Run the tasks with a vault password; returns the exit code and the output without folds."""
    vault = tmp_path / "[a folder]" / "key.yml"
    vault.parent.mkdir()
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    values = {"serve_vault_file": str(vault), "serve_api_key": ""}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": {"spark-a": host}, "vars": values}}))
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "play.yml").write_text(PLAY.format(used=tmp_path / "used"))
    # As a new owner has it: names from this folder, which is not that of the playbook.
    (tmp_path / "ansible.cfg").write_text(
        f"[defaults]\nroles_path = {ROOT / 'roles'}\nvault_password_file = password\n"
    )
    (tmp_path / "other").write_text("wrong\n")
    (tmp_path / "password").write_text("right\n")

    def run(*arguments: str, password: str | None = None) -> tuple[int, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        if password:
            environment["ANSIBLE_VAULT_PASSWORD_FILE"] = password
        elif password == "":
            (tmp_path / "ansible.cfg").write_text(f"[defaults]\nroles_path = {ROOT / 'roles'}\n")
        done = subprocess.run(
            ["ansible-playbook", "-i", "hosts.yml", "playbooks/play.yml", *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run


def test_a_key_is_made_once_kept_encrypted_and_shown_once(run, tmp_path):
    vault = tmp_path / "[a folder]" / "key.yml"
    code, output = run("--check")
    assert code == 0 and not vault.exists(), output
    code, output = run("-vvv")
    key = (tmp_path / "used").read_text()
    assert code == 0 and len(key) == 48 and output.count(key) == 1, output
    assert vault.read_text().startswith("$ANSIBLE_VAULT;") and vault.stat().st_mode & 0o077 == 0
    code, output = run("-vvv", "--diff", password="password")
    assert code == 0 and "changed=0" in output and key not in output, output
    assert (tmp_path / "used").read_text() == key


def encrypted(tmp_path, text):
    command = ["ansible-vault", "encrypt", "--vault-password-file", str(tmp_path / "password"), "--output", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("password", "content", "words"),
    [
        ("", None, "spark-a: found serve_vault_file=.* no vault password file; .*ANSIBLE_VAULT_PASSWORD_FILE"),
        ("other", "serve_api_key: of-another-password", "could not be written"),
        (None, "serve_api_key:", "16 or more printable"),
        (None, "serve_api_key: short", "16 or more printable"),
        (None, "serve_api_key: [0123456789abcdef, 0123456789abcdef]", "16 or more printable"),
        (None, "other: value", "16 or more printable"),
        (None, "folder", "could not be written"),
        (None, "plain", "encrypted by the vault password"),
        (None, "no place", "in a folder that exists"),
        (None, "relative", "expected an absolute path"),
    ],
)
def test_a_vault_that_gives_no_key_is_refused(run, tmp_path, password, content, words):
    vault, arguments = tmp_path / "[a folder]" / "key.yml", list[str]()
    if content == "folder":
        vault.mkdir()
    elif content == "plain":
        vault.write_text("serve_api_key: 0123456789abcdef\n")
    elif content == "no place":
        vault.parent.rmdir()
    elif content == "relative":
        arguments = ["-e", "serve_vault_file=key.yml"]
    elif content:
        vault.write_text(encrypted(tmp_path, content))
    code, output = run(*arguments, password=password)
    assert code == 2 and "spark-a: " in output and re.search(words, output), output
    assert not (tmp_path / "used").exists()
