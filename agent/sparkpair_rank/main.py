"""The agent's loop: one thread that waits for descriptors and the clock, and hands everything to the core."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkpair_rank import core, probes
from sparkpair_rank.digests import digest_files, read_digests, serves
from sparkpair_rank.environment import find_damage
from sparkpair_rank.guard import DRAINING
from sparkpair_rank.kernel_log import KernelLog
from sparkpair_rank.link import Links
from sparkpair_rank.processes import TERM_S, Group, process_state
from sparkpair_rank.report import Journal, Systemd, own_cost, prometheus

CONFIG = Path("/etc/sparkpair/agent.json")
SOCKET = Path("/run/sparkpair-rank/agent.sock")
STATE = Path("/var/lib/sparkpair-rank")
HEARTBEAT_S = 1.0
LOOK_S = 2.0
REST = 10.0
"""Reading what would be served may take a tenth of the time while nothing runs."""
EVIDENCE_S = 12.0
PR_SET_CHILD_SUBREAPER = 36
PRIVATE = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_hold(pause: Path, fatal: list[str]) -> str:
    """Why nothing may be restarted now: a pause file, or a PCIe device that counted fatal errors. Empty: nothing."""
    if pause.exists():
        return f"{pause} exists" + (f": {text}" if (text := read_text(pause)) else "")
    for name in fatal:
        for line in read_text(Path(name)).splitlines():
            words = line.split()
            if words[:1] == ["TOTAL_ERR_FATAL"] and words[-1] != "0":
                # Restarts do not mend it and were seen to lock the host up (public reports).
                return f"found {words[-1]} fatal PCIe errors in {name}: shut the nodes down and cut their power"
    return ""


def read_served(config: Mapping[str, Any]) -> dict[str, str]:
    """What this node would serve, and under `core.UNFIT` why it must not. Raises OSError.

    A look at every file of the environment: about 0.3 s for the 34,000 of the lab's.
    """
    root = Path(config.get("root", "/opt/sparkpair"))
    found = read_digests(root, Path(config["model"]), os.environ.get("VLLM_NCCL_SO_PATH", ""))
    found["options"] = digest_files(map(Path, config.get("same_files", [])))
    found["settings"] = os.environ.get("SPARKPAIR_PAIR_DIGEST", "")[:12]
    written = os.environ.get("SPARKPAIR_SERVES", serves(found))
    if found["env"] and (damage := find_damage(root / "envs" / found["env"])):
        found[core.UNFIT] = f"{damage}: ansible-playbook site.yml"
    elif written != serves(found):
        found[core.UNFIT] = (
            f"found environment and scheduler {serves(found)}, expected {written} of /etc/sparkpair/rank.env: "
            "ansible-playbook site.yml, or playbooks/rollback.yml"
        )
    return found


class Shell:
    """Everything around the core that touches the world."""

    def __init__(self, config: dict[str, Any], secret: bytes, key: str) -> None:
        self.config = config
        self.state, self.control = Path(config.get("state", STATE)), Path(config.get("control", SOCKET))
        self.rank = int(config["rank"])
        self.names: list[str] = config["names"]
        limits = core.Limits(**config.get("limits", {}))
        self.journal = Journal(self.rank)
        self.systemd = Systemd(os.environ)
        self.group = Group(self.say, self.journal.vllm)
        self.agent = core.Agent(self.rank, self.names, secrets.token_hex(8), limits, self._last_generation())
        self.api = probes.Api(**config["api"], key=key)
        self.selector = selectors.DefaultSelector()
        self.events: queue.SimpleQueue[core.Event] = queue.SimpleQueue()
        self.links = Links(
            self.rank, config["rails"], int(config["port"]), secret, self.selector, self.events.put, self.say
        )
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        self.ending: dict[str, float] | None = None
        self.evidence: threading.Thread | None = None
        self.reading_metrics = False
        self.sent: Any = None
        self.sent_at = self.looked_at = self.pinged_at = self.digest_at = -1e9
        self.digests: dict[str, str] = {}
        self.reading: object = None
        self.kernel_log = KernelLog(config.get("known_bad", []))
        self.draining = self.control.with_name("draining")
        self.hold = ""
        self.done = False

    # What it says.

    def say(self, text: str, priority: int = 6) -> None:
        agent = getattr(self, "agent", None)
        self.journal.write("sparkpair-rank", agent.own.generation if agent else 0, text, priority)

    def live_state(self) -> dict[str, Any]:
        now = time.monotonic()
        limit = self.agent.limits.lost
        heard = self.links.rails_heard(now)
        peers = range(1, len(self.names)) if self.rank == 0 else [0]
        rails = {
            self.names[peer]: {
                str(rail): heard.get(peer, {}).get(rail, limit) < limit
                for rail, by_rank in enumerate(self.config["rails"])
                if by_rank[0] and by_rank[peer or self.rank]
            }
            for peer in peers
        }
        return {**self.agent.summary(now), "rails": rails, **own_cost(), "paused": bool(self.hold)}

    # Generations.

    def _last_generation(self) -> int:
        text = read_text(self.state / "generation")
        return int(text) if text.isdigit() else 0

    def _spawn(self, generation: int) -> None:
        try:
            # The generation is the same on all nodes; numbers never go back, so that logs stay readable.
            part = self.state / "generation.new"
            part.write_text(f"{generation}\n")
            part.replace(self.state / "generation")
        except OSError as error:
            self.say(f"cannot keep the generation's number: {error}", 4)
        environment = {name: value for name, value in os.environ.items() if name not in PRIVATE}
        environment["SPARKPAIR_GENERATION"] = str(generation)
        self.draining.unlink(missing_ok=True)
        if self.rank == 0:
            environment[DRAINING] = str(self.draining)
            folders = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = ":".join(filter(None, folders))
        else:
            environment.pop("CREDENTIALS_DIRECTORY", None)
        self.say(f"generation {generation}: starting rank {self.rank}")
        try:
            self.group.end_orphans()
            self.group.start(generation, self.config["command"], environment)
        except OSError as error:
            cause = core.Cause(f"rank {self.rank} cannot start: {error}", time.time(), 0)
            self.events.put(core.Died(generation, cause))
            return
        self.selector.register(self.group.pipe, selectors.EVENT_READ, self._output)
        for descriptor, _ in self.group.watched.values():
            self.selector.register(descriptor, selectors.EVENT_READ, self._process_ended)

    def _output(self, _: int) -> None:
        if self.group.pipe >= 0 and not self.group.read():
            self.selector.unregister(self.group.pipe)
            os.close(self.group.pipe)
            self.group.pipe = -1

    def _process_ended(self, _: int) -> None:
        what = self.group.ended()
        self._output(0)
        self._unwatch()
        if what and self.agent.own.phase == core.RUNNING:
            cause = self.group.cause()
            death = core.Cause(f"{self.names[self.rank]}: {what}", time.time(), 1)
            self.events.put(core.Died(self.group.generation, cause if cause and cause.weight == 0 else death))

    def _unwatch(self) -> None:
        for descriptor in self.group.forget():
            with suppress(KeyError):
                self.selector.unregister(descriptor)
            os.close(descriptor)

    def _kill(self, action: core.Kill) -> None:
        now = time.monotonic()
        self.say(f"generation {action.generation}: ending rank {self.rank}: {action.why}", 4)
        self.ending = {"term": 0.0 if action.graceful else -1.0, "until": now}
        self._unwatch()
        if action.evidence:
            self.ending["until"] = now + EVIDENCE_S
            folder = self.state / "evidence" / f"{time.strftime('%Y%m%d-%H%M%S')}-generation-{action.generation}"

            def save() -> None:
                answer = probes.ask(self.api, "GET", "/metrics", None, 3.0)[1] if self.rank == 0 else ""
                try:
                    self.group.save_evidence(folder, answer)
                    self.say(f"evidence is in {folder}")
                except OSError as error:
                    self.say(f"cannot save evidence: {error}", 4)

            self.evidence = threading.Thread(target=save, daemon=True)
            self.evidence.start()
        elif action.graceful:
            self.group.terminate()
            self.ending["until"] = now + TERM_S
        self._end(now)

    def _end(self, now: float) -> None:
        """Go on ending the local generation; tells the core when nothing is left."""
        if self.ending is None:
            return
        if self.evidence and self.evidence.is_alive() and now < self.ending["until"]:
            return
        self.evidence = None
        self.group.reap()
        graceful = self.ending["term"] == 0.0 and now < self.ending["until"]
        # The main process ends its children; once it is gone, nobody will end what is left.
        if graceful and process_state(self.group.main) not in ("", "Z"):
            return
        if not self.group.kill_all() or not self.group.reap():
            return
        self.group.clear_shared()
        self._output(0)
        if self.group.pipe >= 0:
            self.selector.unregister(self.group.pipe)
            os.close(self.group.pipe)
            self.group.pipe = -1
        self.ending, self.group.main = None, 0
        self.say(f"generation {self.group.generation}: nothing is left of rank {self.rank}")
        self._forget_served()
        # What ended it may forbid a restart: look before anything starts again.
        self.looked_at = self.kernel_log.asked_at = -1e9
        self._look(now)
        self.events.put(core.Gone(self.group.generation, self.group.cause()))

    # Questions from threads.

    def _in_thread(self, work: Callable[[], core.Event]) -> None:
        def run() -> None:
            self.events.put(work())
            with suppress(OSError):
                self.wake_write.send(b".")

        threading.Thread(target=run, daemon=True).start()

    def _act(self, action: core.Action) -> None:
        match action:
            case core.Spawn(generation):
                self._spawn(generation)
            case core.Kill():
                self._kill(action)
            case core.Probe(generation, kind, within):

                def ask() -> core.Event:
                    answer, text = probes.probe(self.api, kind, within)
                    return core.Probed(generation, kind, answer, text)

                self._in_thread(ask)
            case core.Refuse():
                with suppress(OSError):
                    self.draining.touch()
            case core.ReadMetrics(generation):
                if not self.reading_metrics:
                    self.reading_metrics, asked = True, time.monotonic()

                    def read() -> core.Event:
                        found = probes.read_metrics(self.api)
                        self.reading_metrics = False
                        return core.Metrics(generation, *found, asked)

                    self._in_thread(read)
            case core.Ready():
                self.systemd.tell("READY=1")
            case core.Log(text):
                self.say(text)
            case core.Leave():
                self.done = True

    # The loop.

    def _read_served(self) -> None:
        """Read in a thread what would be served; what a start forgot meanwhile is not taken."""
        mark = self.reading = object()

        def read() -> core.Event:
            began, found = time.monotonic(), dict[str, str]()
            try:
                found = read_served(self.config)
            except OSError as error:
                self.say(f"cannot read what would be served: {error}", 4)
            if self.reading is mark:
                now = time.monotonic()
                self.digests, self.reading = found, None
                self.digest_at = now + max(LOOK_S, REST * (now - began))
            return core.Tick()

        self._in_thread(read)

    def _forget_served(self) -> None:
        """Nothing starts on what was read before the last start."""
        self.digests, self.reading, self.digest_at = {}, None, -1e9

    def _look(self, now: float) -> None:
        """Read the node: digests while nothing runs (what runs keeps those of its start), reasons to hold."""
        running = self.agent.own.phase != core.STOPPED
        if not running and self.reading is None and now >= self.digest_at:
            self._read_served()
        # Engine processes appear in the first seconds, and only one that is watched is seen to end.
        if now - self.looked_at >= (LOOK_S if time.time() - self.group.started > 10.0 else HEARTBEAT_S / 2):
            self.looked_at = now
            self.hold = read_hold(Path(self.config["pause"]), self.config.get("fatal", []))
            self.hold = self.hold or self.kernel_log.hold(now)
            if running:
                for descriptor in self.group.look():
                    self.selector.register(descriptor, selectors.EVENT_READ, self._process_ended)
        self.events.put(core.Look(self.digests, self.hold, self.group.compiling, self.group.detail))

    def _handle(self, now: float) -> None:
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            for action in self.agent.handle(event, now):
                self._act(action)

    def _speak(self, now: float, force: bool = False) -> None:
        message = self.agent.order if self.rank == 0 else self.agent.status
        if message is not None and (force or message != self.sent or now - self.sent_at >= HEARTBEAT_S):
            self.sent, self.sent_at = message, now
            self.links.broadcast(message)
        self.systemd.status(self.agent.text(now))
        if self.systemd.watchdog_s and now - self.pinged_at >= self.systemd.watchdog_s / 3:
            self.pinged_at = now
            self.systemd.tell("WATCHDOG=1")

    def _wait(self) -> float:
        """Seconds until the next look: short while something changes."""
        if self.ending is not None:
            return 0.05
        phase = self.agent.phase if self.rank == 0 else self.agent.own.phase
        steady = phase in (core.SERVING, core.FAILED, core.STOPPED, core.RUNNING, core.WAITING)
        return HEARTBEAT_S if steady else 0.25

    def _wake(self, _: int) -> None:
        with suppress(BlockingIOError):
            self.wake_read.recv(4096)

    def run(self) -> int:
        """Run until told to leave; returns the exit status."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Signals wake the selector through the same socket as threads do.
        signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.events.put(core.Command("leave")))
        self.selector.register(self.wake_read, selectors.EVENT_READ, self._wake)
        self.group.end_orphans()
        self._open_control()
        self.say(f"agent of rank {self.rank} of {len(self.names)}, {self.names[self.rank]}")
        while not self.done:
            now = time.monotonic()
            self.links.tend(now, self.agent.limits.lost + 1.0)
            self._look(now)
            self.events.put(core.Tick())
            self._handle(now)
            self._speak(now)
            for key, mask in self.selector.select(self._wait()):
                key.data(mask)
            self.group.reap()
            now = time.monotonic()
            self._end(now)
            self._handle(now)
            self._speak(now)
        self.systemd.tell("STOPPING=1")
        self._speak(time.monotonic(), force=True)
        self.links.close()
        self.control.unlink(missing_ok=True)
        return 0

    # The local socket: GET /state, GET /metrics, POST /restart and /reset, as HTTP for `curl --unix-socket`.

    def _open_control(self) -> None:
        self.control.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        server.bind(str(self.control))
        self.control.chmod(0o600)
        server.listen(8)
        self.selector.register(server, selectors.EVENT_READ, lambda _: self._accept_control(server))

    def _accept_control(self, server: socket.socket) -> None:
        with suppress(OSError):
            client, _ = server.accept()
            with client:
                # Only root and this user can connect; they speak at once or not at all.
                client.settimeout(0.5)
                client.sendall(self._answer(client.recv(4096).decode(errors="replace").split("\r\n")[0]).encode())

    def _answer(self, request: str) -> str:
        method, _, rest = request.partition(" ")
        path = rest.split(" ")[0]
        kind, code = "application/json", "200 OK"
        if (method, path) == ("GET", "/state"):
            body = json.dumps(self.live_state(), indent=1) + "\n"
        elif (method, path) == ("GET", "/metrics"):
            kind, body = "text/plain; version=0.0.4", prometheus(self.live_state())
        elif method == "POST" and path in ("/restart", "/reset"):
            if self.rank == 0:
                self.events.put(core.Command("restart" if path == "/restart" else "reset"))
                body = "{}\n"
            else:
                code, body = "409 Conflict", json.dumps({"error": f"ask on {self.names[0]}, which leads"}) + "\n"
        else:
            code, body = (
                "404 Not Found",
                json.dumps({"error": "GET /state, GET /metrics, POST /restart, POST /reset"}) + "\n",
            )
        return f"HTTP/1.0 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}"


def credential(name: str) -> str:
    """A systemd credential of this unit; empty when there is none."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return read_text(Path(folder) / name) if folder else ""


def main(config: Path = CONFIG) -> int:
    """Run the agent that `config` describes."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    secret = credential("agent-secret")
    if not secret:
        print("found no credential agent-secret, expected one: run playbooks/serve.yml", file=sys.stderr)
        return 1
    keys = credential("api-keys").splitlines()
    return Shell(settings, secret.encode(), keys[0] if keys else "").run()
