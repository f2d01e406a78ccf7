"""What the end-to-end tests share: the lab, and how to run things."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, check: bool = True, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command in the repository and return what it printed; fails with all of it."""
    done = subprocess.run(
        command, cwd=cwd, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def lab(*verb: str) -> str:
    return run(sys.executable, "lab/lab.py", *verb)


def play(playbook: str, *arguments: str, inventory: str = "inventory/lab", check: bool = True, **variables: str) -> str:
    return run("ansible-playbook", "-i", inventory, playbook, *arguments, check=check, **variables)


def new_lab():
    """Fresh nodes; afterwards the lab is gone without a trace. KEEP_LAB=1 uses and keeps what runs."""
    if os.environ.get("KEEP_LAB"):
        yield
        return
    lab("down")
    lab("up")
    yield
    lab("down")
    assert "nothing is left" in lab("leftovers")


fresh_lab = pytest.fixture(scope="session")(new_lab)
own_lab = pytest.fixture(scope="module")(new_lab)
