"""The lab's verbs: build, up, reset, down, kill, start, status."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lab import apt_repository, base, disk, host, leftovers, network, supervisor, tiny_model, wheelhouse
from lab.cgroups import Group
from lab.settings import ROOT, LabError, Node, Settings

BOOT_SECONDS = 60.0
"""Longest wait for SSH on a node that boots (it takes 2 s on two idle cores)."""


@dataclass(frozen=True)
class Record:
    """What runs under the lab's name on this machine, kept in /run/LAB/lab.json while it exists.

    `state` and `checkout` are folders: the lab's files, and the clone that started it.
    `lower`, `wheelhouse` and `model` are the cached parts that its nodes use.
    """

    state: str
    checkout: str
    count: int
    lower: str
    wheelhouse: str
    model: str

    def binds(self, node: Node) -> list[tuple[Path, str]]:
        """Folders that `node` sees read-only. Wheels and model are on the head alone: they have to be copied."""
        on_head = [(Path(self.wheelhouse), "/srv/wheelhouse"), (Path(self.model), "/srv/model")]
        return [(Path(self.state) / "apt", "/srv/apt"), *(on_head if node.index == 0 else [])]


def read_record(settings: Settings) -> Record | None:
    """The record of the lab of this name, or None."""
    try:
        return Record(**json.loads((settings.run_folder / "lab.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_running(settings: Settings, node: Node) -> bool:
    """Whether the node is on."""
    return supervisor.node_group(settings, node).child("boot").populated()


def node_state(settings: Settings, node: Node) -> str:
    """One word: running, off (somebody wanted it), unsupervised (would not come back from a reboot) or dead."""
    group = supervisor.node_group(settings, node)
    if is_running(settings, node):
        sound = group.child("launcher").populated() and network.exists(settings.namespace(node))
        return "running" if sound else "unsupervised"
    return "off" if (settings.node_folder(node) / "off").exists() else "dead"


def refuse_foreign(settings: Settings) -> None:
    """Raise LabError if a living lab of this name belongs to another folder that still exists."""
    record = read_record(settings)
    if record is None or record.state == str(settings.state) or not Path(record.state).is_dir():
        return
    if any(is_running(settings, Node(index)) for index in range(record.count)):
        raise LabError(
            f"a lab named '{settings.ident}' is running from {record.checkout}, with its files in {record.state}. "
            "Remove that one first:\n"
            f"  LAB_ID={settings.ident} LAB_DIR={record.state} python3 {record.checkout}/lab/lab.py down\n"
            "or give this one a name of its own: LAB_ID=..."
        )


def build(settings: Settings) -> Record:
    """Build the cached parts that are missing, and return what a lab made of them would be."""
    host.require_tools()
    settings.cache.mkdir(parents=True, exist_ok=True)
    with host.lock(settings.cache / "build.lock", "build"), Group(settings.name).child("build").visited():
        lower = base.build(settings.cache)
        recipe = hashlib.sha256(Path(tiny_model.__file__).read_bytes()).hexdigest()[:12]
        model = settings.cache / f"model-{recipe}"
        if not model.is_dir():
            host.step("making the tiny model")
            tiny_model.build(model)
        try:
            wheels = wheelhouse.build(settings.cache)
        except wheelhouse.WheelhouseError as error:
            raise LabError(str(error)) from error
    return Record(str(settings.state), str(ROOT), settings.count, str(lower), str(wheels), str(model))


def up(settings: Settings) -> None:
    """Bring the lab up: keep what runs, start what is off, start over if anything was left half done."""
    refuse_foreign(settings)
    host.require_tools()
    record = read_record(settings)
    if record is not None and record.state == str(settings.state):
        states = {node: node_state(settings, node) for node in settings.nodes}
        if record.count == settings.count and set(states.values()) <= {"running", "off"}:
            off = [node for node, state in states.items() if state == "off"]
            for node in off:
                supervisor.spawn(settings, node)
            wait(settings, settings.nodes)
            host.step(f"the lab is up ({', '.join(node.name for node in off) or 'nothing'} had to be started)")
            return
        if record.count != settings.count and "running" in states.values():
            raise LabError(
                f"the lab has {record.count} nodes; `lab.py reset` makes one of {settings.count} (LAB_NODES)"
            )
    if leftovers.in_kernel(settings):
        host.step("removing what is left of an earlier lab")
        leftovers.remove_kernel_objects(settings)
    fresh(settings)


def reset(settings: Settings) -> None:
    """Cut the power of all nodes and boot fresh ones; keys, addresses and the lab's side of the network stay."""
    refuse_foreign(settings)
    host.require_tools()
    record = read_record(settings)
    if record is None or record.state != str(settings.state) or record.count != settings.count:
        leftovers.remove_kernel_objects(settings)
    else:
        for node in settings.nodes:
            supervisor.node_group(settings, node).kill()
        leftovers.hang_up(settings)
    fresh(settings)


def fresh(settings: Settings) -> None:
    """Boot new nodes on new disks; no node may be running."""
    record = build(settings)
    leftovers.claim_state(settings)
    old = settings.state / f".old-{os.getpid()}"
    old.mkdir(parents=True, exist_ok=True)
    for folder in settings.state.glob("spark-?"):
        folder.rename(old / folder.name)
    (settings.run_folder / "ssh").mkdir(parents=True, exist_ok=True)
    (settings.run_folder / "ssh").chmod(0o700)
    disk.write(settings.run_folder / "lab.json", json.dumps(asdict(record), indent=1) + "\n")
    host.step(f"making fresh disks for {' and '.join(node.name for node in settings.nodes)}")
    disk.write_shared_state(settings)
    disk.write(settings.state / "vllm_env_lock", wheelhouse.lock_name(Path(record.wheelhouse)) + "\n")
    apt_repository.build(settings.state / "apt")
    password = (settings.state / "become_password").read_text().strip()
    hashed = disk.password_hash(Path(record.lower), password)
    for node in settings.nodes:
        disk.write_fresh(settings, node, Path(record.lower), hashed)
    if not network.is_sound(settings):
        network.remove(settings)
        network.lay(settings)
    host.step("booting")
    for node in settings.nodes:
        supervisor.spawn(settings, node)
    for folder in settings.state.glob(".old-*"):
        shutil.rmtree(folder)
    wait(settings, settings.nodes)
    host.step("the lab is up")


def down(settings: Settings, force: bool = False) -> None:
    """Remove everything that the lab has on this machine, except the cached parts."""
    host.step(f"removing lab '{settings.ident}'; on a loaded machine it can take a minute")
    if not force:
        refuse_foreign(settings)
    if not leftovers.find(settings):
        host.step("there is no lab to remove")
        return
    leftovers.remove_kernel_objects(settings)
    leftovers.remove_state(settings)
    if left := leftovers.find(settings):
        raise LabError("these could not be removed:\n  " + "\n  ".join(left))
    host.step("the lab is gone; its cached parts stay in " + str(settings.cache))


def require_own(settings: Settings) -> Record:
    """The record of this folder's lab; raises LabError if it is not up."""
    refuse_foreign(settings)
    record = read_record(settings)
    if record is None or record.state != str(settings.state):
        raise LabError("the lab is not up; start it with `lab.py up`")
    return record


def kill(settings: Settings, node: Node) -> None:
    """Cut the power of one node."""
    require_own(settings)
    supervisor.node_group(settings, node).kill()
    network.unplug(settings, node)
    supervisor.mark_off(settings, node)
    leftovers.hang_up(settings, node.address)
    host.step(f"{node.name} is off")


def start(settings: Settings, node: Node) -> None:
    """Switch one node on, with the disk that it has."""
    require_own(settings)
    if is_running(settings, node):
        host.step(f"{node.name} is running already")
        return
    supervisor.spawn(settings, node)
    wait(settings, [node])
    host.step(f"{node.name} is up")


def supervise(settings: Settings, node: Node) -> None:
    """Be the process behind a running node (started by `up` and `start`)."""
    record = require_own(settings)
    supervisor.supervise(settings, node, Path(record.lower), record.binds(node))


def as_running(settings: Settings) -> Settings:
    """`settings` with the number of nodes that the running lab has, whatever LAB_NODES says now."""
    record = read_record(settings)
    return replace(settings, count=record.count) if record else settings


def status(settings: Settings) -> bool:
    """Print one line for each node; whether all of them run."""
    record = read_record(settings)
    if record is None:
        print("the lab is down")
        return False
    print(f"lab '{settings.ident}' of {record.checkout}, files in {record.state}")
    where = replace(as_running(settings), state=Path(record.state))
    states = {node: node_state(where, node) for node in where.nodes}
    for node, state in states.items():
        print(f"{node.name}  {node.address}  {state}")
    return set(states.values()) == {"running"}


def wait(settings: Settings, nodes: Sequence[Node]) -> None:
    """Wait until the nodes take SSH log-ins; raises LabError with the end of the console of one that does not."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: _wait_for(settings, node), nodes))


def _wait_for(settings: Settings, node: Node) -> None:
    command = [
        "ssh", "-F", str(settings.state / "ssh_config"), "-o", "ControlPath=none", "-o", "ConnectTimeout=2",
        "-o", "BatchMode=yes", node.name, "true",
    ]  # fmt: skip
    started = time.monotonic()
    problem = ""
    while time.monotonic() - started < BOOT_SECONDS:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return
        problem = done.stderr.strip()
        if time.monotonic() - started > 5 and not supervisor.node_group(settings, node).populated():
            problem = "it ended by itself"
            break
        time.sleep(0.1)
    console = settings.node_folder(node) / "console.log"
    tail = ""
    with suppress(OSError):
        tail = "\n  ".join(console.read_text(errors="replace").splitlines()[-12:])
    hint = ""
    if "wrong fs type" in tail:
        hint = (
            f"\n{settings.state} cannot hold an overlay's writable layer; set LAB_DIR to a folder on ext4, xfs or tmpfs"
        )
    raise LabError(f"{node.name} did not come up ({problem}); its console ({console}) ends with:\n  {tail}{hint}")
