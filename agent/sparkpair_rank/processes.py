"""The processes of one generation: start them, watch each of them, read what they print, end all of them."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sparkpair_rank.core import Cause

PROC = Path("/proc")
SHARED = Path("/dev/shm")
ENGINE = "VLLM::"
"""vLLM's children call themselves VLLM::EngineCore, VLLM::Worker_TP1 and so on; the death of any is the rank's."""
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "fatbinary", "ninja", "c++", "cc1plus", "g++", "gcc", "cc1", "ld"})
EXCEPTION = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception|Timeout)): (?P<text>\S.*)")
QUIET = re.compile(r"^(?:\([^)]*\) )?(?:\x1b\[[\d;]*m)*(?:DEBUG|INFO|WARNING)\b")
"""vLLM's log below ERROR: its warnings name exceptions that may come, such as that of too many open files."""
NOISE = re.compile(
    r"nccl|gloo|TCPStore|ProcessGroup|DistBackend|DistNetwork|DistStore|connection (reset|closed|refused)|broken pipe"
    r"|EngineDeadError|Engine core init\w+ failed|died unexpectedly|WorkerProc (failed|init\w+)|cancelled",
    re.IGNORECASE,
)
"""What a rank says when it lost another one; the fault is elsewhere."""
PERCENT = re.compile(r"(\d+)% Completed")
STAGES = (
    (re.compile(r"^sparkpair: waiting for the fabric"), "waiting for the fabric"),
    (re.compile(r"Start compiling|torch\.compile takes"), "compiling"),
    (re.compile(r"[Cc]aptur\w+ (CUDA|cuda) ?[Gg]raph"), "capturing graphs"),
    (re.compile(r"init_process_group|world_size=\d+ rank="), "joining the other ranks"),
    (re.compile(r"Starting to load model"), "loading 0 %"),
    (re.compile(r"KV cache size"), "warming the engine"),
)
LINES_KEPT = 300
BEFORE_DEATH_S = 30.0
"""An exception so long before the end of a rank counts as its cause; older ones were answers to requests."""
TERM_S = 10.0
"""Longest wait after SIGTERM; a head that waits for its worker does not stop by itself (30 s and more, measured)."""


def own_cgroup() -> Path | None:
    """The cgroup of this process under systemd, or None: then descendants are looked up instead."""
    if "INVOCATION_ID" not in os.environ:
        return None
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/") and line != "0::/":
                folder = Path("/sys/fs/cgroup") / line[4:]
                if (folder / "cgroup.procs").exists():
                    return folder
    return None


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`; with this process as their reaper none can escape."""
    found: list[int] = []
    for task in (PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                if process_state(child) != "Z":
                    found.append(child)
                found += descendants(child)
    return found


def process_state(pid: int) -> str:
    """One letter as in `ps`; empty when the process is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def process_name(pid: int) -> str:
    """The first word of its command line, without folders; vLLM's processes overwrite theirs."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").split()
    except OSError:
        return ""
    return (words[0] if words and words[0].startswith(ENGINE) else Path(words[0]).name) if words else ""


def how_it_ended(pid: int) -> str:
    """How a process that ended did so, as far as the kernel still tells."""
    with suppress(OSError, ValueError, IndexError):
        status = int((PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()[49])
        return describe(status)
    return "ended"


def describe(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def exception_in(line: str) -> re.Match[str] | None:
    """The exception that a line tells of."""
    named = "Error" in line or "Exception" in line or "Timeout" in line
    return EXCEPTION.search(line) if named and not QUIET.search(line) else None


def find_cause(lines: Iterable[tuple[float, str]], since: float) -> Cause | None:
    """The first exception in (wall clock time, line) pairs since `since`: one that names a fault before mere noise."""
    noise = None
    for at, line in lines:
        match = exception_in(line) if at >= since else None
        if match is None:
            continue
        text = f"{match[1]}: {match['text']}"[:300]
        if not NOISE.search(line):
            return Cause(text, at, 0)
        noise = noise or Cause(text, at, 2)
    return noise


class Group:
    """The processes of the generation that runs, and those that older ones left behind."""

    def __init__(self, say: Callable[[str], None], log: Callable[[int, str], None]) -> None:
        self.say, self.log = say, log
        self.cgroup = own_cgroup()
        self.generation = 0
        self.pipe = -1
        self.main = 0
        self.buffer = b""
        self.lines: deque[tuple[float, str]] = deque(maxlen=LINES_KEPT)
        self.exceptions: deque[tuple[float, str]] = deque(maxlen=50)
        self.detail = ""
        self.watched: dict[int, tuple[int, str]] = {}
        self.first_word: dict[int, str] = {}
        self.compiling = False
        self.started = 0.0
        self.spared: set[int] = set()

    def pids(self) -> list[int]:
        """Living processes of this agent, without itself."""
        if self.cgroup is None:
            return [pid for pid in descendants(os.getpid()) if pid not in self.spared]
        found: list[int] = []
        for file in [self.cgroup / "cgroup.procs", *self.cgroup.glob("*/cgroup.procs")]:
            with suppress(OSError):
                found += [int(line) for line in file.read_text().split()]
        return [pid for pid in found if pid != os.getpid() and pid not in self.spared]

    def kill_all(self) -> bool:
        """SIGKILL to everything; whether nothing was there."""
        pids = self.pids()
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def clear_shared(self) -> None:
        """Remove shared memory that ended processes left: nobody else runs as the service's user.

        A generation that was killed leaves its message queues there (192 MB on the head of the lab's pair, measured).
        """
        if self.cgroup is None:
            return
        for file in SHARED.iterdir():
            with suppress(OSError):
                if file.stat().st_uid == os.getuid():
                    file.unlink()

    def end_orphans(self, within: float = 10.0) -> None:
        """End what an agent before this one left behind. Raises TimeoutError when the kernel does not end it."""
        until = time.monotonic() + within
        told = False
        while not self.kill_all():
            if not told:
                told = True
                self.say("ending processes of an old generation")
            if time.monotonic() > until:
                raise TimeoutError(f"processes {self.pids()} do not end, not even by SIGKILL: reboot the node")
            self.reap()
            time.sleep(0.05)
        self.clear_shared()

    def start(self, generation: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`. Raises OSError when it cannot be."""
        self.generation, self.detail, self.buffer = generation, "starting", b""
        self.lines.clear()
        self.exceptions.clear()
        self.first_word.clear()
        self.compiling, self.started = False, time.time()
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write, True)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=write, stderr=write, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self.main, self.pipe = process.pid, read
        # The kernel tells of its end by the descriptor; `reap` collects it.
        process.returncode = 0
        self.watched[process.pid] = (os.pidfd_open(process.pid), "vllm serve")

    def look(self) -> list[int]:
        """Find engine processes that are not watched yet, and compilers. Returns descriptors to watch."""
        new: list[int] = []
        compiling = False
        for pid in self.pids():
            if pid in self.watched:
                continue
            name = process_name(pid)
            compiling = compiling or name in COMPILERS
            if name.startswith(ENGINE):
                with suppress(OSError):
                    descriptor = os.pidfd_open(pid)
                    self.watched[pid] = (descriptor, name)
                    new.append(descriptor)
        self.compiling = compiling
        return new

    def ended(self) -> str:
        """What ended of the watched processes, in words; empty when all live."""
        for pid, (descriptor, name) in self.watched.items():
            if select.select([descriptor], [], [], 0)[0]:
                return f"{name} (process {pid}) {how_it_ended(pid)}"
        return ""

    def forget(self) -> list[int]:
        """Close and return all descriptors of watched processes."""
        descriptors = [descriptor for descriptor, _ in self.watched.values()]
        self.watched.clear()
        return descriptors

    def cause(self) -> Cause | None:
        """The first exception that this rank printed near its end."""
        return find_cause(self.exceptions, max(self.started, time.time() - BEFORE_DEATH_S))

    def read(self) -> bool:
        """Read what was printed; whether the pipe is still open."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return True
        if not data and self.buffer:
            data = b"\n"
        elif not data:
            return False
        self.buffer += data
        *lines, self.buffer = re.split(rb"[\r\n]+", self.buffer)
        if len(self.buffer) > 65536:
            lines, self.buffer = [*lines, self.buffer], b""
        for raw in lines:
            line = raw.decode("utf-8", errors="replace").rstrip()
            if line:
                self._line(line)
        return True

    def _line(self, line: str) -> None:
        self.log(self.generation, line)
        now = time.time()
        self.lines.append((now, line[:400]))
        if exception_in(line):
            self.exceptions.append((now, line[:600]))
        if match := PERCENT.search(line):
            self.detail = f"loading {match[1]} %"
        else:
            for pattern, text in STAGES:
                if pattern.search(line):
                    self.detail = text

    def terminate(self) -> None:
        """SIGTERM to the main process, which ends its children."""
        if self.main:
            with suppress(ProcessLookupError):
                os.kill(self.main, signal.SIGTERM)

    def reap(self) -> bool:
        """Collect children that ended, also those that lost their parent; whether none is left.

        A process leaves its cgroup's list when it begins to end, while its port and its memory are still taken
        (measured: the next API server was answered by the old one's socket). A child is gone when it was waited for.
        """
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if info is None or info.si_pid in self.spared:
                return False
            with suppress(ChildProcessError):
                os.waitpid(info.si_pid, 0)

    def save_evidence(self, folder: Path, metrics: str) -> None:
        """Write what can be known about processes that hang: last lines, states, stacks if py-spy is there, metrics."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").write_text("\n".join(f"{at:.3f} {line}" for at, line in list(self.lines)) + "\n")
        (folder / "metrics.txt").write_text(metrics)
        pids = self.pids()
        rows = []
        for pid in pids:
            wait = ""
            with suppress(OSError):
                wait = (PROC / str(pid) / "wchan").read_text()
            rows.append(f"{pid} {process_state(pid)} {process_name(pid)} {wait}")
        (folder / "processes.txt").write_text("\n".join(rows) + "\n")
        tool = shutil.which("py-spy") or shutil.which("py-spy", path="/opt/sparkpair/current/bin")
        for pid in pids if tool else []:
            if process_state(pid) == "T" or not process_name(pid).startswith(ENGINE):
                continue
            assert tool is not None
            dump = subprocess.Popen(
                [tool, "dump", "--pid", str(pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self.spared.add(dump.pid)
            with suppress(subprocess.TimeoutExpired):
                (folder / f"stack-{pid}.txt").write_text(dump.communicate(timeout=3)[0])
            dump.kill()
            dump.wait()
            self.spared.discard(dump.pid)
        for old in sorted(folder.parent.iterdir())[:-10]:
            shutil.rmtree(old, ignore_errors=True)
