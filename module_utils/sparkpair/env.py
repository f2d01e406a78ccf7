"""One environment per lock: built aside, proven by importing vLLM, moved into place, chosen by one symlink.

Layout under ``root`` (one file system, so that uv can hard-link from its cache and a rename is atomic)::

    envs/<digest>/              complete or built anew; holds sparkpair-env.json and the list of its files
    envs/.partial-<digest>/     being built, or left by an installation that died: the next one starts over
    current -> envs/<digest>    what the units start
    wheels/<digest>/            what it is built from (see wheels.py)
    cache/  uv/<version>/uv     wheels unpacked, while an installation runs; the pinned installer

The environment is built under its partial name and renamed, rather than built in place and marked as
complete: whoever looks at ``envs/<digest>`` sees all of it or nothing, and there is no marker to forget.
That needs scripts which find their interpreter relative to themselves, which ``uv venv --relocatable``
writes, and bytecode that does not mind being moved, which CPython's does not (the file names in it are
corrected on import).

Standard library only; every function works on paths given to it, so it is tested without root or network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.env_lock import Lock, Requirement, env_digest
from ansible.module_utils.sparkpair.environment import MANIFEST, find_damage, record
from ansible.module_utils.sparkpair.files import replace_folder
from ansible.module_utils.sparkpair.model import Place
from ansible.module_utils.sparkpair.wheels import place_of

SPACE_FACTOR = 5
"""Bytes wanted on disk per byte of wheels. Measured with the CPU lock: 0.44 GB of wheels are 1.9 GB
installed and compiled (the cache is hard-linked); the rest is the wheel that is being unpacked."""

BEAT = 5.0
"""Seconds between lines of progress."""

NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "beegfs", "gluster", "fuse.sshfs", "fuse.gluster")
"""Beginnings of the types of file systems that several nodes share."""

REMEDY = "run playbooks/vllm_env.yml -e vllm_env_rebuild=true for all nodes"

RELEASES = Path("/var/lib/sparkpair/releases")
"""Where the serve stage keeps what belongs to each environment that was in service, one file for each."""

LOCK_WAIT = 900.0
"""Seconds to wait for another installation on this node."""

_FACTS = (
    "import json,platform,sys;print(json.dumps([platform.python_version(),platform.machine(),platform.libc_ver()[1],"
    "sys.implementation.name]))"
)

_PROOF = """
import importlib.metadata, json, pathlib
import torch, vllm
from vllm.engine.arg_utils import EngineArgs
fields = EngineArgs.__dataclass_fields__
print("\\nPROOF " + json.dumps({
    "vllm": importlib.metadata.version("vllm"), "torch": torch.__version__, "cuda": torch.version.cuda or "",
    "capabilities": {name: name in fields for name in ("nnodes", "node_rank", "master_addr", "master_port")},
    "site_packages": str(pathlib.Path(vllm.__file__).parent.parent),
}))
"""


class EnvError(Exception):
    """The environment cannot be installed; the text says what was found, what was expected and what mends it."""


@dataclass(frozen=True)
class Python:
    """The interpreter of the environments: path, version ("3.12.3"), machine and glibc of the node."""

    path: str
    version: str
    machine: str
    glibc: tuple[int, int]

    @property
    def minor(self) -> str:
        """Return the version without patch level ("3.12")."""
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class Plan:
    """What is to be in place: the parsed lock and its text, the installer's pin, the interpreter, where and how."""

    root: Path
    lock: Lock
    lock_text: str
    uv: Requirement
    python: Python
    log: Path

    @property
    def digest(self) -> str:
        """Return the name of the environment."""
        digest: str = env_digest(self.lock_text, self.python.minor, self.python.machine)
        return digest

    @property
    def path(self) -> Path:
        """Return the folder of the environment."""
        return self.root / "envs" / self.digest

    @property
    def wanted(self) -> tuple[Requirement, ...]:
        """Return every distribution that the installation takes, the installer among them."""
        return (*self.lock.requirements, self.uv)

    @property
    def wheels(self) -> Place:
        """Return where its wheels belong."""
        return place_of(self.root, self.digest)

    @property
    def partial(self) -> Path:
        """Return the folder in which the environment is built."""
        return self.root / "envs" / f".partial-{self.digest}"


def inspect_python(path: str) -> Python:
    """Ask an interpreter what it is.

    Raises:
        EnvError: there is none at ``path``, or it does not answer.
    """
    try:
        done = subprocess.run([path, "-I", "-c", _FACTS], capture_output=True, text=True, check=True, timeout=30)
        version, machine, glibc, implementation = json.loads(done.stdout)
        major, minor = (int(part) for part in glibc.split(".")[:2])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvError(
            f"{path} is no usable Python ({error}); set vllm_env_python to one that the lock is for"
        ) from error
    if implementation != "cpython":
        raise EnvError(f"{path} is {implementation}, not CPython; set vllm_env_python")
    return Python(path, version, machine, (major, minor))


def require_fit(lock: Lock, python: Python) -> None:
    """Check that the lock was made for this node.

    Raises:
        EnvError: another Python version, another machine, or a glibc older than the lock's.
    """
    wanted = f"Python {lock.python} on {lock.machine} with glibc {lock.glibc[0]}.{lock.glibc[1]} or newer"
    found = f"Python {python.version} on {python.machine} with glibc {python.glibc[0]}.{python.glibc[1]}"
    if (python.minor, python.machine) != (lock.python, lock.machine) or python.glibc < lock.glibc:
        raise EnvError(f"the lock is for {wanted}, this node has {found}; set vllm_env_lock or vllm_env_python")


def require_local(path: Path, mounts: str) -> None:
    """Check that a folder is on a disk of this node; ``mounts`` is the text of /proc/mounts.

    Raises:
        EnvError: it is on a network's file system. Ranks that share compiled kernels break each other (public reports).
    """
    resolved = path.resolve()
    found = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    above = [(len(point), kind) for point, kind in found if resolved.is_relative_to(point)]
    kind = max(above, default=(0, ""))[1]
    if kind.startswith(NETWORK):
        raise EnvError(f"found {path} on {kind}, expected a disk of this node: mount one there")


def read_manifest(env: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete environment, None for anything else."""
    return judge(env)[0]


def judge(env: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the manifest of a complete environment, or None and why (empty when there is none at all)."""
    if not env.is_dir():
        return None, ""
    try:
        manifest = json.loads((env / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict) or manifest.get("digest") != env.name:
        return None, f"{MANIFEST} is not that of {env.name}"
    if not os.access(env / "bin/python", os.X_OK):
        return None, "bin/python is no program"
    damage = find_damage(env)
    return (None, damage) if damage else (manifest, "")


def current_name(root: Path) -> str:
    """Return the digest that ``current`` names, empty when there is no such symlink.

    Raises:
        EnvError: ``current`` is a real file or folder, which is never replaced.
    """
    link = root / "current"
    if link.exists() and not link.is_symlink():
        raise EnvError(f"found a file or folder {link}, expected a symlink to one of {root}/envs; move it away")
    return link.readlink().name if link.is_symlink() else ""


def switch(plan: Plan) -> None:
    """Point ``current`` at the planned environment, in one step; raises EnvError, see ``current_name``."""
    current_name(plan.root)
    link = plan.root / "current"
    fresh = plan.root / ".current.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"envs/{plan.digest}")
    fresh.replace(link)


def install(plan: Plan, rebuild: bool = False) -> dict[str, Any]:
    """Build, prove and put in place the planned environment. Return its manifest.

    ``rebuild`` builds a complete one anew too. The wheels are there; uv checks each against the lock.

    What other environments hold and what ``current`` names is not touched. A failed attempt is removed.

    Raises:
        EnvError: no space, no installer, a wheel that is missing or has another hash, or a vLLM that cannot
            be imported. The message ends with the last lines of the log.
    """
    os.umask(0o022)
    (plan.root / "envs").mkdir(parents=True, exist_ok=True)
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with only_one(plan.root) as holder, plan.log.open("w", encoding="utf-8") as log:
        manifest, damage = judge(plan.path)
        if manifest and not rebuild:  # another installation was quicker
            return manifest
        shutil.rmtree(plan.partial, ignore_errors=True)
        # Hard-linked, so a file that was changed in an environment would have changed here too.
        shutil.rmtree(plan.root / "cache", ignore_errors=True)
        require_space(plan)
        steps = Steps(log, holder, plan)
        if damage or rebuild:
            steps.say(f"rebuilding {plan.path}: {damage or 'vllm_env_rebuild is true'}")
        try:
            manifest = _build(plan, steps)
        except BaseException:
            shutil.rmtree(plan.partial, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(plan.root / "cache", ignore_errors=True)
        replace_folder(plan.partial, plan.path)
        steps.say(f"done: {plan.path}")
        return manifest


def _build(plan: Plan, steps: Steps) -> dict[str, Any]:
    """Fill the partial folder. Return the manifest that was written into it."""
    steps.say(f"1/4 installer uv {plan.uv.version}")
    uv = ensure_uv(plan, steps)
    common = ["--no-config", "--no-progress", "--cache-dir", str(plan.root / "cache")]
    steps.say(f"2/4 environment for Python {plan.python.version}")
    steps.run(
        [
            str(uv),
            "venv",
            *common,
            "--relocatable",
            "--no-python-downloads",
            "--python",
            plan.python.path,
            str(plan.partial),
        ]
    )
    python = plan.partial / "bin" / "python"
    requirements = plan.partial / "requirements.txt"
    requirements.write_text(plan.lock_text, encoding="utf-8")
    size = f"{plan.lock.download / 1e9:.1f} GB"
    steps.say(f"3/4 {len(plan.lock.requirements)} wheels ({size}), then bytecode")
    with steps.progress():
        steps.run([
            str(uv), "pip", "sync", *common, "--offline", "--no-index", "--find-links", str(plan.wheels.path),
            "--python", str(python), "--require-hashes", "--no-build",
            "--link-mode", "hardlink", "--compile-bytecode", str(requirements),
        ])  # fmt: skip
    forget_wheels(plan.partial)
    steps.say("4/4 proof: import vLLM")
    proof = steps.run([str(python), "-I", "-c", _PROOF])
    line = next((line for line in reversed(proof.splitlines()) if line.startswith("PROOF ")), "PROOF {}")
    manifest = {"digest": plan.digest, "python": plan.python.version, **json.loads(line.removeprefix("PROOF "))}
    wanted = plan.lock.version_of("vllm")
    if manifest.get("vllm") != wanted:
        raise EnvError(f"the environment imports vLLM {manifest.get('vllm')}, the lock has {wanted}")
    if not manifest["capabilities"]["nnodes"]:
        raise EnvError(f"vLLM {wanted} cannot serve over two nodes (its EngineArgs has no nnodes); lock a newer one")
    manifest["site_packages"] = str(Path(manifest["site_packages"]).relative_to(plan.partial))
    manifest["libc"] = ".".join(map(str, plan.python.glibc))
    manifest["packages"] = {r.name: r.version for r in plan.lock.requirements}
    manifest["files"], manifest["content"] = record(plan.partial)
    (plan.partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def forget_wheels(env: Path) -> None:
    """Remove what uv noted of the wheels' files: their times differ between nodes, and so would the environments."""
    for note in env.glob("lib/*/site-packages/*.dist-info/uv_cache.json"):
        listing = note.with_name("RECORD")
        lines = listing.read_text(encoding="utf-8").splitlines(keepends=True)
        listing.write_text("".join(line for line in lines if "/uv_cache.json," not in line), encoding="utf-8")
        note.unlink()


def require_space(plan: Plan) -> None:
    """Check the disk before anything is downloaded.

    Raises:
        EnvError: less than ``SPACE_FACTOR`` times the download is free.
    """
    wanted, free = plan.lock.download * SPACE_FACTOR, shutil.disk_usage(plan.root).free
    if free < wanted:
        raise EnvError(
            f"{plan.root} has {free / 1e9:.1f} GB free, the environment wants {wanted / 1e9:.1f} GB while it is built; "
            f"free space there (old environments in {plan.root}/envs, {plan.root}/cache) or mount a larger disk there"
        )


def ensure_uv(plan: Plan, steps: Steps) -> Path:
    """Return the pinned installer, taking it from the wheelhouse or the index when it is not there yet.

    Raises:
        EnvError: it cannot be had, or its wheel has another hash than the pin.
    """
    folder = plan.root / "uv" / str(plan.uv.version)
    if (folder / "uv").exists():
        return folder / "uv"
    partial = folder.with_name(f".partial-{plan.uv.version}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    wheels = [w for w in plan.wheels.path.glob(f"uv-{plan.uv.version}-*.whl") if plan.python.machine in w.name]
    if not wheels:
        raise EnvError(f"no wheel uv-{plan.uv.version}-*{plan.python.machine}.whl in {plan.wheels.path}; {REMEDY}")
    data = wheels[0].read_bytes()
    if hashlib.sha256(data).hexdigest() not in plan.uv.hashes:
        raise EnvError(f"{wheels[0]} is not the pinned one (its sha256 is not in locks/uv.txt); {REMEDY}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = wheel.getinfo(f"uv-{plan.uv.version}.data/scripts/uv")
        with wheel.open(member) as source, (partial / "uv").open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    (partial / "uv").chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder / "uv"


def prunable(plan: Plan, keep: int) -> list[Path]:
    """Return what is old: environments but the planned one, ``keep`` others and those that are in use, and leftovers.

    The others count from the one that was last in service. Leftovers are what dead installations left, and the wheels
    of other environments.
    """
    envs = plan.root / "envs"
    others = [env for env in envs.glob("[!.]*") if env.name != plan.digest]
    old = [env for env in sorted(others, key=_last_served, reverse=True)[max(1, keep) :] if not in_use(env)]
    wheels = [folder for folder in plan.wheels.path.parent.glob("*") if folder != plan.wheels.path]
    return sorted([*old, *envs.glob(".*"), *wheels])


def prune(plan: Plan, keep: int) -> None:
    """Remove what is old; nobody installs meanwhile."""
    with only_one(plan.root):
        for folder in prunable(plan, keep):
            shutil.rmtree(folder)


def _last_served(env: Path) -> float:
    """Return when an environment was last put in service, else installed (seconds since 1970)."""
    times = [path.stat().st_mtime for path in (RELEASES / f"{env.name}.json", env / MANIFEST) if path.exists()]
    return max(times, default=0.0)


def in_use(env: Path, proc: Path = Path("/proc")) -> bool:
    """Return whether a process was started from an environment; needs root to see those of other users."""
    wanted = os.fsencode(env) + b"/"
    for cmdline in proc.glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if any(argument.startswith(wanted) for argument in cmdline.read_bytes().split(b"\0")):
                return True
    return False


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[int]:
    """Hold the node's installation lock; give its file descriptor.

    Children inherit the descriptor: should this process be killed, the lock stays until its installer has
    ended too, so nobody else touches the folder that it still writes to.

    Raises:
        EnvError: another installation holds it for longer than ``LOCK_WAIT``.
    """
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvError(
                        f"another installation holds {root}/.lock; wait for it to end and run again"
                    ) from None
                time.sleep(0.5)
        yield descriptor
    finally:
        os.close(descriptor)


class Steps:
    """Runs the commands of an installation and writes them, and what they print, to its log."""

    def __init__(self, log: Any, holder: int, plan: Plan) -> None:
        self._log, self._holder, self._plan = log, holder, plan

    def say(self, line: str) -> None:
        """Write a line with the time of day."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        self._log.flush()

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Say every few seconds how much is unpacked and installed, while something else runs."""
        over, begun = threading.Event(), time.monotonic()

        def tell() -> None:
            while not over.wait(BEAT):
                installed = len(list(self._plan.partial.glob("lib/*/site-packages/*.dist-info")))
                self.say(
                    f"    {installed} of {len(self._plan.lock.requirements)} packages after "
                    f"{time.monotonic() - begun:.0f} s, {shutil.disk_usage(self._plan.root).free / 1e9:.1f} GB free"
                )

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def run(self, command: list[str]) -> str:
        """Run a command to its end. Return what it printed to stdout.

        Raises:
            EnvError: it failed; the message holds the end of the log and a remedy.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL, text=True, check=False,
                env=environment, pass_fds=(self._holder,), cwd=self._plan.root,
            )  # fmt: skip
        except OSError as error:
            raise EnvError(f"{command[0]} does not run: {error}") from error
        self._log.write(done.stdout)
        self._log.flush()
        if done.returncode:
            said = self._plan.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
            raise EnvError(f"{explain(said)} (exit {done.returncode}, log {self._plan.log}): " + " | ".join(said))
        return done.stdout


def explain(lines: list[str]) -> str:
    """Return one sentence on why an installer failed, from the last lines that it printed."""
    text = "\n".join(lines).lower()
    for sign, sentence in (
        ("no space left on device", "the disk is full; free space and run again, what was in use is untouched"),
        ("hash mismatch", f"a wheel is not the locked one; {REMEDY}"),
        ("no solution found", "a locked wheel fits no Python of this node; make the lock anew"),
    ):
        if sign in text:
            return sentence
    return "the installer failed"
