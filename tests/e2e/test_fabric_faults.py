"""Whatever cuts an unconfirmed plan, both nodes are as before within 60 s, and nobody lends a hand."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from fabric_lab import NODES, addressed, ip, journal, picture, root, wait
from test_demo import ROOT, changed, lab, play

pytestmark = pytest.mark.usefixtures("own_lab")
BACK_S = 60
"""Promised time from the fault to the old state."""

DEAF = "nft add table inet deaf; nft add chain inet deaf in '{ type filter hook input priority 0; }'; \
nft add rule inet deaf in icmp type echo-request drop"
"""Rules under which the plan is applied but never proven, so that it stays unconfirmed."""


@pytest.fixture
def before():
    """What both nodes look like, deaf for pings, before the plan."""
    for node in NODES:
        root(node, DEAF)
    pictures = {node: picture(node) for node in NODES}
    assert not any(addressed(node) for node in NODES)
    yield pictures
    for node in NODES:
        root(node, "nft delete table inet deaf 2>/dev/null || true")


@pytest.fixture
def controller(request):
    """A run of the fabric stage, which waits for pings that never come."""
    more = getattr(request, "param", [])
    command = [
        "ansible-playbook",
        "-i",
        "inventory/lab",
        "playbooks/fabric.yml",
        "-e",
        "fabric_ping_timeout=100",
        *more,
    ]
    with (ROOT / ".cache/fabric-fault.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    yield process
    kill(process)


def kill(process):
    """The controller's machine loses power: no process of the run says goodbye."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_back(started: float) -> None:
    wait(lambda: not any(addressed(node) or journal(node) for node in NODES), BACK_S + 30)
    took = time.monotonic() - started
    print(f"back {took:.1f} s after the fault")
    assert took < BACK_S


@pytest.mark.parametrize("controller", [["-e", "fabric_confirm_timeout=30"]], indirect=True)
def test_a_second_run_is_refused_and_a_controller_that_dies_after_the_plan_was_applied(before, controller):
    wait(lambda: all(addressed(node) for node in NODES), 60)
    output = " ".join(play("playbooks/fabric.yml", check=False).split())
    assert "spark-a: another run of the fabric stage is at work on this node" in output
    assert all(addressed(node) for node in NODES), "the plan of the first run stays"
    started = time.monotonic()
    kill(controller)
    wait_until_back(started)
    assert {node: picture(node) for node in NODES} == before


def test_a_management_network_that_is_cut_in_the_middle_of_an_apply(before, controller):
    wait(lambda: any(journal(node) for node in NODES), 60)
    started = time.monotonic()
    for node in NODES:
        ip(node, "link", "set", "enP7s7", "down")
    wait(lambda: any(addressed(node) for node in NODES), 20)  # the node itself goes on with the apply
    wait_until_back(started)
    kill(controller)
    for node in NODES:
        ip(node, "link", "set", "enP7s7", "up")
    lab("up")
    assert {node: picture(node) for node in NODES} == before


def test_a_power_cut_of_both_nodes_before_the_confirmation(before, controller):
    wait(lambda: all(addressed(node) for node in NODES), 60)
    started = time.monotonic()
    for node in NODES:
        lab("kill", node)
    kill(controller)
    for node in NODES:
        lab("start", node)
    wait_until_back(started)
    for node in NODES:
        root(node, DEAF)  # did not outlive the power cut, and is part of the picture
    assert {node: picture(node) for node in NODES} == before


def test_afterwards_the_fabric_comes_up_as_on_fresh_nodes():
    assert changed(play("playbooks/fabric.yml")) == {1}
    assert changed(play("playbooks/fabric.yml")) == {0}
