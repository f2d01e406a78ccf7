"""Starting a rank on another node: signed requests over a real socket, no shell, and an end whatever happens."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import nccl_run, peer
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

SECRET = "s" * 43
GOOD = (ROOT / "tests/fixtures/tools/all-gather-healthy-reconstructed.txt").read_text()


@contextlib.contextmanager
def serving(handler):
    """A peer on a free port of loopback; yields the port and the server."""
    server = peer.Server("127.0.0.1", 0, SECRET, handler)
    port = server.server_address[1]
    thread = threading.Thread(target=server.serve, args=(5, 5))
    thread.start()
    try:
        yield port, server
    finally:
        server.over.set()
        server.asked.set()
        thread.join()


def echo(request):
    return {"status": 0, "out": json.dumps(request), "err": ""}


def test_a_request_is_answered():
    with serving(echo) as (port, _):
        assert json.loads(peer.ask("127.0.0.1", port, SECRET, {"do": "x", "n": 1})["out"]) == {"do": "x", "n": 1}


def test_another_secret_is_refused_and_nothing_is_done():
    done = []
    with serving(lambda request: done.append(request) or {"status": 0}) as (port, server):
        with pytest.raises(peer.PeerError, match="refused this run's secret"):
            peer.ask("127.0.0.1", port, "t" * 43, {"do": "daemon"})
        for junk in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"mac": 1, "body": 2}\n', b"[" * 5000 + b"\n"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.recv(100)
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""
        assert done == [] and not server.asked.is_set()


def test_an_answer_cannot_be_replayed():
    nonce, other = "a" * 64, "b" * 64
    line = peer.pack(SECRET, nonce, "ask", {"do": "daemon"})
    assert peer.unpack(SECRET, nonce, "ask", line) == {"do": "daemon"}
    for wrong in ((other, "ask"), (nonce, "answer")):
        with pytest.raises(peer.PeerError):
            peer.unpack(SECRET, *wrong, line)


@given(
    st.binary(max_size=80)
    | st.text(max_size=80).map(str.encode)
    | st.recursive(
        st.none() | st.text(max_size=5) | st.integers(), lambda x: st.dictionaries(st.sampled_from(["mac", "body"]), x)
    ).map(lambda data: json.dumps(data).encode())
)
def test_no_line_makes_the_reader_raise_anything_else(line):
    with contextlib.suppress(peer.PeerError):
        peer.unpack(SECRET, "n", "ask", line)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (['  orted -mca ess "env" -mca x 1'], ["orted", "-mca", "ess", "env", "-mca", "x", "1"]),
        (
            ["PATH=/usr/bin:$PATH ; export PATH ; /usr/bin/orted", "-mca", "y", '"a b"', ")"],
            ["orted", "-mca", "y", "a b"],
        ),
        (["orted -mca z 1; reboot"], ["orted", "-mca", "z", "1;", "reboot"]),
    ],
)
def test_the_daemon_is_found_in_what_mpirun_writes_for_a_shell(words, command):
    assert peer.daemon_arguments(words) == command


@pytest.mark.parametrize("words", [[], ["bash -c orted2"], ["rm -rf /"], ['"'], ["notorted"]])
def test_nothing_but_a_daemon_is_started(words):
    with pytest.raises(peer.PeerError):
        peer.daemon_arguments(words)


def test_peers_that_nobody_asks_or_ends_give_up():
    server = peer.Server("127.0.0.1", 0, SECRET, echo)
    started = time.monotonic()
    assert server.serve(0.2, 60) is False and time.monotonic() - started < 5


def make_plan(tmp_path: Path, rank: int, port: int, **change) -> nccl_run.Plan:
    values = {
        "rank": rank,
        "addresses": ("127.0.0.1", "127.0.0.1"),
        "network": "127.0.0.0/8",
        "port": port,
        "secret": SECRET,
        "user": "sparkpair",
        "groups": ("video",),
        "folder": tmp_path / f"node{rank}",
        "hcas": ("a", "b"),
        "environment": {"NCCL_IB_HCA": "=a,b"},
        "size": 1 << 30,
        "iterations": 5,
        "seconds": 20,
        "arms": ("both", "one"),
    }
    return nccl_run.Plan(**{**values, **change})


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two plans on one machine, a head with the program, and what either side ran."""
    monkeypatch.setattr(nccl_run, "RUNTIME", tmp_path / "run")
    monkeypatch.setattr(nccl_run, "OVER_S", 2.0)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0/all_gather_perf").write_bytes(b"program")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ran: list[list[str]] = []

    def start(run_peer):
        thread = threading.Thread(target=lambda: results.append(attempt(run_peer)))
        thread.start()
        return thread

    def attempt(run_peer):
        try:
            return nccl_run.listen(make_plan(tmp_path, 1, port), run_peer)
        except peer.PeerError as error:
            return str(error)

    results: list = []
    return lambda **change: make_plan(tmp_path, 0, port, **change), start, results, ran


def test_two_arms_over_two_nodes(pair, tmp_path):
    head, start, results, ran = pair

    def run_peer(command):
        ran.append(command)
        return 0, "", ""

    def run_head(command):
        # What mpirun does: call the agent that it was given, as the unit that systemd made.
        ran.append(command)
        plan = head()
        secret = (tmp_path / "run/secret").read_text()
        assert (tmp_path / "run/secret").stat().st_mode & 0o777 == 0o400 and secret == SECRET
        peer.ask("127.0.0.1", plan.port, secret, {"do": "daemon", "command": ["orted -mca ess env"]})
        return 0, GOOD, ""

    thread = start(run_peer)
    result = nccl_run.lead(head(), run_head)
    thread.join(10)
    assert results == [{}] and result["given"] == ["127.0.0.1"]
    assert (tmp_path / "node1/all_gather_perf").read_bytes() == b"program"
    assert (tmp_path / "node1/all_gather_perf").stat().st_mode & 0o777 == 0o755
    assert [result["arms"][arm]["verdict"]["name"] for arm in ("both", "one")] == ["pass", "pass"]
    daemons = [command for command in ran if command[-4:] == ["orted", "-mca", "ess", "env"]]
    assert len(daemons) == 2 and "--setenv=NCCL_IB_HCA==a,b" in daemons[0] and "--setenv=NCCL_IB_HCA==a" in daemons[1]
    for command in ran:
        assert "--property=User=sparkpair" in command and "--property=LimitMEMLOCK=infinity" in command
        assert not any(SECRET in word for word in command)
    assert not (tmp_path / "run").exists()


def test_a_run_that_hangs_ends_with_that_verdict(pair):
    head, start, _, _ = pair
    thread = start(lambda _: (0, "", ""))
    ticks = iter((0.0, 20.0))
    plan = head(arms=("both",))
    arm = nccl_run.run_arm(plan, lambda _: (1, "", "killed"), "both", clock=lambda: next(ticks))
    peer.ask("127.0.0.1", plan.port, SECRET, {"do": "over"})
    thread.join(10)
    assert arm["verdict"]["name"] == "hang" and arm["bench"] is None


def test_a_head_without_the_program_says_so_and_lets_its_peers_go(pair, tmp_path):
    head, start, results, _ = pair
    (tmp_path / "node0/all_gather_perf").unlink()
    thread = start(lambda _: (0, "", ""))
    with pytest.raises(peer.PeerError, match="on the head"):
        nccl_run.lead(head(), lambda _: (0, "", ""))
    thread.join(10)
    assert results == [{}] and not (tmp_path / "run").exists()


def test_a_program_that_changed_on_its_way_is_not_taken(tmp_path):
    answer = nccl_run.handler(make_plan(tmp_path, 1, 1), lambda _: (0, "", ""))
    data = base64.b64encode(b"evil").decode()
    with pytest.raises(peer.PeerError, match="changed on its way"):
        answer({"do": "take", "sha256": hashlib.sha256(b"good").hexdigest(), "data": data})
    with pytest.raises(peer.PeerError, match="unknown"):
        answer({"do": "shell"})
    assert not (tmp_path / "node1").exists()


def test_the_copy_that_mpirun_calls_runs_alone_and_keeps_quotes(tmp_path):
    (tmp_path / "peer.py").write_bytes(nccl_run.own_source())
    run = make_plan(tmp_path, 1, 1)
    answer = nccl_run.handler(run, lambda command: (7, json.dumps(command[command.index("orted") :]), "!"))
    with serving(answer) as (port, _):
        (tmp_path / "secret").write_text(SECRET)
        environment = {"CREDENTIALS_DIRECTORY": str(tmp_path), "SPARKPAIR_PEER_PORT": str(port)}
        words = [" orted", "-mca", "ess", '"env"', "-mca", "plm_rsh_agent", '"/usr/bin/python3 /run/peer.py"']
        command = [sys.executable, "-IS", str(tmp_path / "peer.py"), "127.0.0.1", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (7, "!")
    assert json.loads(done.stdout) == [
        "orted", "-mca", "ess", "env", "-mca", "plm_rsh_agent", "/usr/bin/python3 /run/peer.py",
    ]  # fmt: skip


def test_the_copy_without_a_credential_fails_like_ssh(capsys, monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert peer.main(["host", "orted"]) == 255 and "peer: " in capsys.readouterr().err
