"""Two real agents on loopback addresses, with a fake vLLM: processes, wires, signals, the local socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from sparkpair_rank import core, environment, kernel_log, link, main, page_cache, probes, processes, report

NAMES = ["spark-a", "spark-b"]
RAILS = [["127.0.0.1", "127.0.0.2"], ["127.0.1.1", "127.0.1.2"]]
LIMITS = {"lost": 2.0, "ready": 20, "drain": 1, "quiet": 2, "canary": 1, "metrics": 0.3, "backoff": 0.2}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Pair:
    """Two agents as processes of their own; `ask` reads the live state of one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.api = folder, free_port(), free_port()
        self.agents: dict[int, subprocess.Popen] = {}
        (folder / "credentials").mkdir()
        (folder / "credentials" / "agent-secret").write_text("a secret of this test\n")

    def start(self, rank: int, **changes: object) -> None:
        config = {
            "rank": rank,
            "names": NAMES,
            "rails": RAILS,
            "port": self.port,
            "command": [
                sys.executable,
                str(ROOT / "tests/unit/fake_vllm.py"),
                str(self.folder),
                str(rank),
                str(self.api),
            ],
            "api": {"host": "127.0.0.1", "port": self.api, "model": "tiny", "warmup_tokens": 8, "tools": True},
            "model": str(self.folder / "model"),
            "root": str(self.folder),
            "pause": str(self.folder / f"pause-{rank}"),
            "limits": LIMITS,
            "state": str(self.folder / f"state-{rank}"),
            "control": str(self.folder / f"{rank}.sock"),
            **changes,
        }
        (self.folder / f"state-{rank}").mkdir(exist_ok=True)
        (self.folder / f"{rank}.json").write_text(json.dumps(config))
        code = "import sys, pathlib, sparkpair_rank.main as m; sys.exit(m.main(pathlib.Path(sys.argv[1])))"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "agent"),
            "CREDENTIALS_DIRECTORY": str(self.folder / "credentials"),
            "SPARKPAIR_PAIR_DIGEST": "same",
        }
        with (self.folder / f"{rank}.log").open("ab") as log:
            self.agents[rank] = subprocess.Popen(
                [sys.executable, "-c", code, str(self.folder / f"{rank}.json")], env=environment, stdout=log, stderr=log
            )

    def ask(self, rank: int, request: str = "GET /state") -> dict:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.folder / f"{rank}.sock"))
            client.sendall(f"{request} HTTP/1.0\r\n\r\n".encode())
            answer = "".join(iter(lambda: client.recv(65536).decode(), ""))
        return json.loads(answer.partition("\r\n\r\n")[2])

    def wait(self, rank: int, wanted, seconds: float = 25.0) -> dict:
        """Wait until `wanted(state)`; fails with the state and the log."""
        until, state = time.monotonic() + seconds, {}
        while time.monotonic() < until:
            try:
                state = self.ask(rank)
                if wanted(state):
                    return state
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"{state}\n{(self.folder / '0.log').read_text()}\n{(self.folder / '1.log').read_text()}")

    def serving(self, generation: int) -> dict:
        self.wait(1, lambda state: state["serving"] and state["generation"] == generation)
        return self.wait(0, lambda state: state["serving"] and state["generation"] == generation)

    def worker(self, rank: int) -> int:
        return int((self.folder / f"worker-{rank}").read_text())

    def end(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents.values():
            try:
                agent.wait(15)
            except subprocess.TimeoutExpired:
                agent.kill()
                raise
        # What an agent that was killed left behind; under systemd its cgroup goes with it.
        for file in self.folder.glob("worker-*"):
            assert not processes.process_name(int(file.read_text())).startswith("VLLM::"), "a worker is left"


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    made.end()


def test_a_pair_serves_survives_the_death_of_a_worker_a_cut_and_a_wedge_and_ends_when_told(pair):
    pair.start(0)
    time.sleep(1.0)
    assert "spark-b: not heard" in pair.wait(0, lambda state: state["digests"])["text"]
    pair.start(1)
    state = pair.serving(1)
    assert state["rails"] == {"spark-b": {"0": True, "1": True}} and state["phase"] == "serving"

    died = time.monotonic()
    os.kill(pair.worker(1), signal.SIGKILL)
    pair.wait(0, lambda state: not state["serving"])
    detected = time.monotonic() - died
    state = pair.serving(2)
    assert detected < 2.0, detected
    assert "VLLM::Worker_TP1" in state["cause"] and "spark-b" in state["cause"]

    (pair.folder / "hang").touch()
    pair.wait(0, lambda state: "wedged" in state["cause"])
    (pair.folder / "hang").unlink()
    pair.serving(3)
    folders = [
        *pair.folder.glob("state-0/evidence/*-generation-2"),
        *pair.folder.glob("state-1/evidence/*-generation-2"),
    ]
    assert len(folders) == 2 and "generation 2 of rank 0" in (folders[0] / "log.txt").read_text()
    assert "num_requests_running" in (folders[0] / "metrics.txt").read_text()

    assert pair.ask(1, "POST /restart")["error"].startswith("ask on spark-a")
    pair.ask(0, "POST /restart")
    state = pair.serving(4)
    assert state["crashes"] == 0

    worker = pair.worker(0)
    pair.agents[1].terminate()
    assert pair.agents[1].wait(10) == 0
    pair.wait(0, lambda state: "spark-b: stopped there" in state["text"])
    assert processes.process_state(worker) in ("", "Z")
    pair.start(1)
    state = pair.serving(5)
    assert state["resident_bytes"] < 40 * 2**20


def test_a_stop_waits_for_requests_in_flight_and_refuses_new_ones(pair):
    for rank in (0, 1):
        pair.start(rank, limits={**LIMITS, "drain": 15, "quiet": 20})
    pair.serving(1)
    (pair.folder / "hang").touch()
    api = probes.Api("127.0.0.1", pair.api, "tiny")
    answers: list[tuple[str, str]] = []
    client = threading.Thread(target=lambda: answers.append(probes.complete(api, "hi", 1, 20.0)))
    client.start()
    time.sleep(0.5)
    pair.agents[1].terminate()
    pair.wait(0, lambda state: "draining" in state["text"])
    time.sleep(1.5)
    assert probes.read_metrics(api)[0] >= 1 and pair.ask(0)["phase"] == "draining"
    (pair.folder / "hang").unlink()
    client.join()
    assert answers == [("ok", "")]
    assert pair.agents[1].wait(10) == 0
    pair.start(1)
    pair.serving(2)
    assert not (pair.folder / "draining").exists()


def test_the_page_cache_is_dropped_before_the_command(tmp_path):
    command = [sys.executable, page_cache.__file__, str(tmp_path / "helper"), sys.executable, "-c", "print('command')"]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=True, timeout=20)
    assert run().stdout.splitlines() == ["command"]
    done = []

    def help_once() -> None:
        client, _ = server.accept()
        time.sleep(0.3)
        done.append(time.monotonic())
        client.close()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "helper"))
        server.listen()
        helper = threading.Thread(target=help_once)
        helper.start()
        assert run().stdout.splitlines() == ["sparkpair: the page cache was dropped", "command"]
        helper.join()
    assert run().stdout.splitlines()[0].startswith("sparkpair: the page cache was not dropped: ")


def test_shared_memory_of_an_ended_generation_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SHARED", tmp_path)
    group = processes.Group(lambda _: None, lambda *_: None)
    (tmp_path / "psm_1").touch()
    group.cgroup = None
    group.clear_shared()
    assert (tmp_path / "psm_1").exists(), "only a service knows that nobody else runs as its user"
    group.cgroup = tmp_path
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: os.geteuid() + 1)
        group.clear_shared()
    assert (tmp_path / "psm_1").exists()
    group.clear_shared()
    assert not (tmp_path / "psm_1").exists()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_drips_is_late(head):
    def drip() -> None:
        client, _ = server.accept()
        with client, suppress(OSError):
            client.sendall(head)
            while True:
                client.sendall(b"x")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, daemon=True).start()
        api = probes.Api("127.0.0.1", server.getsockname()[1], "tiny")
        started = time.monotonic()
        assert probes.complete(api, "hi", 1, 0.5)[0] == "late"
        assert time.monotonic() - started < 2


def test_a_start_that_fails_again_and_again_ends_with_the_first_cause(pair):
    (pair.folder / "fail").touch()
    pair.start(1)
    pair.start(0)
    state = pair.wait(0, lambda state: state["phase"] == "failed")
    assert state["generation"] == 5 and state["first_cause"] == "ValueError: Free memory on device is less than desired"
    (pair.folder / "fail").unlink()
    pair.ask(0, "POST /restart")
    pair.serving(6)


def test_another_secret_is_refused_and_a_pause_file_holds(pair):
    pair.start(0)
    pair.wait(0, lambda state: state["digests"])
    (pair.folder / "credentials" / "agent-secret").write_text("another\n")
    (pair.folder / "pause-1").write_text("new cable\n")
    pair.start(1)
    pair.wait(1, lambda state: state["digests"])
    time.sleep(1.5)
    assert "not heard" in pair.ask(0)["text"]
    assert "a wrong proof" in (pair.folder / "0.log").read_text()
    pair.agents[1].terminate()
    pair.agents[1].wait(10)
    (pair.folder / "credentials" / "agent-secret").write_text("a secret of this test\n")
    pair.start(1)
    pair.wait(0, lambda state: "held on spark-b" in state["text"] and "new cable" in state["text"])
    (pair.folder / "pause-1").unlink()
    pair.serving(1)


def test_a_package_installed_by_hand_stops_the_next_start_until_it_is_gone(pair):
    env = pair.folder / "envs" / "0123456789abcdef"
    env.mkdir(parents=True)
    (env / "vllm.py").touch()
    environment.record(env)
    (pair.folder / "current").symlink_to("envs/0123456789abcdef")
    pair.start(0)
    pair.start(1)
    pair.serving(1)
    (env / "six.py").touch()
    os.kill(pair.worker(1), signal.SIGKILL)
    state = pair.wait(0, lambda state: "not started, spark-a: found 1 files" in state["text"])
    assert "added six.py: ansible-playbook site.yml" in state["text"]
    (env / "six.py").unlink()
    pair.serving(2)


def test_messages_survive_the_wire_and_what_is_none_is_refused():
    status = core.Status(1, "x", obeys=("y", 3), cause=core.Cause("boom", 1.5, 0), digests={"a": "b"})
    for message in (status, core.Order("x", 4, run=2, text="hello")):
        assert link.decode(json.loads(json.dumps(link.encode(message)))) == message
    for data in ({}, {"type": "Status"}, {"type": "Order", "odd": 1}, {"type": "Status", "cause": 1, "obeys": []}):
        with pytest.raises(ValueError, match="no message"):
            link.decode(data)


def test_the_first_exception_that_names_a_fault_wins():
    lines = [
        (1.0, "(Worker pid=1) ERROR 11-30 [x.py:1] ValueError: an old answer to a request"),
        (50.0, "RuntimeError: [gloo] Connection closed by peer"),
        # As vLLM 0.32 printed it on a machine with a low limit.
        (
            50.5,
            "(APIServer pid=3) WARNING 12-01 03:29:32 [system_utils.py:255] Found ulimit of 20000. This can cause "
            "fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
        ),
        (51.0, "(EngineCore pid=2) torch.OutOfMemoryError: CUDA out of memory"),
        (52.0, "RuntimeError: Engine core initialization failed."),
    ]
    found = processes.find_cause(lines, 40.0)
    assert found == core.Cause("torch.OutOfMemoryError: CUDA out of memory", 51.0, 0)
    noise = processes.find_cause(lines[:3], 40.0)
    assert noise is not None and noise.weight == 2
    assert processes.find_cause(lines, 60.0) is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("(Worker pid=1) \x1b[33mWARNING\x1b[0m 12-01 [x.py:1] may end with OSError: too many", False),
        ("INFO 12-01 03:29:32 [x.py:1] ValueError: of a request", False),
        ("(EngineCore pid=2) ERROR 12-01 [x.py:1] RuntimeError: it printed: WARNING 12-01 03:29:31", True),
        ("RuntimeError: the child said INFO 12-01 ready", True),
    ],
)
def test_the_level_of_a_line_counts_and_not_what_it_quotes(line, told):
    assert bool(processes.exception_in(line)) == told


def test_metrics_tell_what_is_busy_and_what_moves():
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\nprocess_cpu 3\n'
    busy, before = probes.parse_metrics(text + "vllm:kv_cache_usage_perc 0.25\n")
    assert busy == 3
    assert probes.parse_metrics(text + "vllm:kv_cache_usage_perc 0.26\n")[1] != before


def test_fatal_errors_of_the_adapter_and_a_pause_hold(tmp_path):
    counters = tmp_path / "aer_dev_fatal"
    counters.write_text("Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0\n")
    assert main.read_hold(tmp_path / "pause", [str(counters), str(tmp_path / "none")]) == ""
    counters.write_text("DLP 2\nTOTAL_ERR_FATAL 2\n")
    assert "found 2 fatal PCIe errors" in main.read_hold(tmp_path / "pause", [str(counters)])
    (tmp_path / "pause").write_text("cable")
    assert main.read_hold(tmp_path / "pause", []).endswith("exists: cable")


def test_what_the_kernel_logs_and_no_restart_mends_holds(tmp_path, monkeypatch):
    known = yaml.safe_load((ROOT / "known_bad.yml").read_text())
    fatal = [entry for entry in known if entry["severity"] == "fatal" and "system_log" in entry["when"]]
    log = kernel_log.KernelLog(fatal)
    assert len(log.known) == len(fatal) >= 5, "the agent understands all of them"
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\ncat {tmp_path}/log 2>/dev/null\n')
    journalctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert log.hold(0.0) == "" == log.hold(59.0)
    (tmp_path / "log").write_text("usb 1-1: new device\nNVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0x55:2)\n")
    assert log.hold(30.0) == "", "asked once a minute"
    found = log.hold(61.0)
    assert "RmInitAdapter failed!" in found and "then reboot" in found
    (tmp_path / "log").unlink()
    assert log.hold(200.0) == found, "until the next boot"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "--since=@0 " in asked[0] and "--since=@0 " not in asked[1]
    assert kernel_log.KernelLog([{**fatal[0], "when": {"system_log": {"matches": "x", "count": 4}}}]).known == []


def test_prometheus_text_has_a_type_for_every_metric():
    state = {
        "rank": 0, "name": "a", "serving": True, "generation": 3, "crashes": 0, "hold": "", "resident_bytes": 1,
        "cpu_s": 0.5, "rails": {"b": {"0": True, "1": False}},
    }  # fmt: skip
    text = report.prometheus(state)
    assert 'sparkpair_rank_serving{rank="0",node="a"} 1' in text
    assert 'sparkpair_rank_rail_up{rank="0",peer="b",rail="1"} 0' in text
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(f"# TYPE {name} " in text for name in names)


def test_systemd_hears_each_status_once(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(1)
        systemd = report.Systemd({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"})
        for text in ("loading", "loading", "serving"):
            systemd.status(text)
        systemd.tell("READY=1")
        assert [server.recv(100) for _ in range(3)] == [b"STATUS=loading", b"STATUS=serving", b"READY=1"]
        assert systemd.watchdog_s == 30
