"""What Ansible asks of a node about its agent, and how sets of files are written."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
from ansible.module_utils.sparkpair import agent, files


@pytest.fixture
def control(tmp_path):
    """A socket that answers as the agent does; put states into `.states`, the last one stays."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "agent.sock"))
    server.listen()
    states: list[dict] = []

    def answer() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(1000)
                state = states.pop(0) if len(states) > 1 else states[0]
                client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(state).encode())

    threading.Thread(target=answer, daemon=True).start()
    yield tmp_path / "agent.sock", states
    server.close()


def test_the_wait_ends_when_the_pair_serves(control):
    path, states = control
    states += [{"serving": False, "phase": "loading", "text": "x"}, {"serving": True, "phase": "serving", "text": "y"}]
    assert agent.wait_until_serving(path, 5, 0.01) == (states[-1], "")


def test_the_wait_ends_at_once_when_the_agents_gave_up(control):
    path, states = control
    states += [{"serving": False, "phase": "failed", "text": "failed: 5 generations; ValueError: x"}]
    assert "ValueError: x" in agent.wait_until_serving(path, 60, 0.01)[1]


def test_no_agent_is_said_with_its_socket(tmp_path):
    state, fault = agent.wait_until_serving(tmp_path / "none", 0.05, 0.01)
    assert state["phase"] == "absent" and "no agent answers" in fault


def test_listeners_of_this_process_are_found():
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
        four.bind(("127.0.0.1", 0))
        six.bind(("::", 0))
        for sock in (four, six):
            sock.listen()
        found = agent.listeners([os.getpid()])
        assert f"127.0.0.1:{four.getsockname()[1]}" in found
        assert f":::{six.getsockname()[1]}" in found


def test_what_a_network_could_reach_is_named():
    found = ["127.0.0.1:8000", "192.168.176.1:25001", "192.168.176.1:41000", "::1:80", "0.0.0.0:9000", ":::25000"]
    fabric = ["192.168.176.1", "192.168.176.2"]
    assert agent.open_listeners(found, fabric, "0.0.0.0:9000", [25000]) == []
    assert agent.open_listeners(found, fabric, "127.0.0.1:8000", []) == ["0.0.0.0:9000", ":::25000"]


def test_closed_ports_come_from_rules_that_drop():
    def rule(right, verdict):
        left = {"payload": {"protocol": "tcp", "field": "dport"}}
        return {"rule": {"expr": [{"match": {"op": "==", "left": left, "right": right}}, {verdict: None}]}}

    table = {
        "nftables": [
            {"table": {}},
            rule({"set": [25000, {"range": [5, 6]}]}, "drop"),
            rule(7, "accept"),
            rule(8, "drop"),
        ]
    }
    assert agent.closed_ports(json.dumps(table)) == [5, 6, 8, 25000]
    assert agent.closed_ports("") == []


def test_a_set_of_files_is_written_once_and_pruned(tmp_path):
    one, two, old = tmp_path / "a" / "one", tmp_path / "a" / "two", tmp_path / "a" / "old"
    wanted = {str(one): "1\n", str(two): "2\n"}
    assert files.plan(wanted, {}, "")[0] == wanted
    for name, text in wanted.items():
        files.put(type(one)(name), text.encode())
    old.write_text("x")
    write, remove = files.plan(wanted, {}, str(tmp_path / "a"))
    assert (write, remove) == ({} if os.getuid() == 0 else wanted, [str(old)])
    one.chmod(0o600)
    assert str(one) in files.plan(wanted, {}, "")[0]
