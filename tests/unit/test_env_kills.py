"""Real uv and small wheels: the copy of the wheels, the installation and the switch are killed at random points.

After each kill, what is in service is a whole environment, and the next run puts the new one in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import env, env_task, model_copy, wheel_download, wheels
from ansible.module_utils.sparkpair.env_lock import Lock, Requirement, render_lock
from conftest import ROOT

KILLS = 24
UV = shutil.which("uv")
pytestmark = pytest.mark.skipif(UV is None, reason="make tools installs uv")

TINY = {
    "torch": {"torch/__init__.py": "__version__ = '2'\nclass version:\n    cuda = '13.0'\n"},
    "vllm": {
        "vllm/__init__.py": "",
        "vllm/engine/__init__.py": "",
        "vllm/engine/arg_utils.py": "class EngineArgs:\n    __dataclass_fields__ = {'nnodes': 1, 'node_rank': 1}\n",
    },
    **{f"filler-{n}": {f"filler_{n}/m{i}.py": f"x = {i}\n" * 50 for i in range(40)} for n in range(12)},
}
"""Packages that stand in for the real ones: what the proof imports, and enough files that a kill finds work to do."""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes]) -> Requirement:
    """Write a wheel. Returns the requirement that locks it."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    machine = os.uname().machine
    tag = f"py3-none-manylinux_2_17_{machine}" if name == "uv" else "py3-none-any"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    path = folder / f"{plain}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
    return Requirement(name, version, (hashlib.sha256(path.read_bytes()).hexdigest(),))


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A wheelhouse with the real uv and two versions of everything else; the locks of both; the pin of uv."""
    folder = tmp_path_factory.mktemp("house")
    version = subprocess.run([UV, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    pin = make_wheel(folder, "uv", version, {f"uv-{version}.data/scripts/uv": Path(UV).resolve().read_bytes()})
    facts = env.inspect_python(sys.executable)
    locks = []
    for release in ("1.0", "2.0"):
        requirements = [make_wheel(folder, name, release, {**files}) for name, files in TINY.items()]
        lock = Lock(release, facts.minor, facts.machine, (2, 17), 10**6, tuple(requirements))
        locks.append(render_lock(lock, ""))
    return folder, locks, pin.line()


def wish(root: Path, lock: str, pin: str, **changes: object) -> dict[str, object]:
    return {
        "state": "current", "lock": lock, "uv_lock": pin, "root": str(root), "python": sys.executable,
        "wheelhouse": "", "keep": 2, "log": str(root.parent / "log" / "env.log"), "rebuild": False,
        "address": "127.0.0.1", "port": 0, "secret": "s", "peers": 1, "streams": 4, **changes,
    }  # fmt: skip


DRIVER = """
import json, sys
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv[1])
from pathlib import Path
from ansible.module_utils.sparkpair import env, env_task, model_copy
env.RELEASES = Path(sys.argv[2])
model_copy.TIMEOUT = model_copy.CONNECT = 5.0
wish = json.loads(sys.argv[3])
for state in sys.argv[4:]:
    env_task.run({**wish, "state": state}, False, print)
"""


def drive(root: Path, wanted: dict[str, object], *states: str) -> subprocess.Popen:
    """Start what Ansible starts on a node, in a process group of its own."""
    command = [sys.executable, "-c", DRIVER, str(ROOT / "module_utils"), str(root.parent / "releases")]
    return subprocess.Popen(
        [*command, json.dumps(wanted), *states], start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def in_service(root: Path) -> str:
    """What the units would start: fails unless it is a whole environment that imports its vLLM. Returns the version."""
    link = root / "current"
    manifest, damage = env.judge(root / str(link.readlink()))
    assert manifest, damage
    code = "import importlib.metadata as m, vllm.engine.arg_utils; print(m.version('vllm'))"
    shown = subprocess.run([link / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == manifest["vllm"]
    return str(manifest["vllm"])


@pytest.fixture
def node(tmp_path, house, monkeypatch):
    """A node whose first version is in service; gives its root."""
    folder, locks, pin = house
    monkeypatch.setattr(env, "RELEASES", tmp_path / "releases")
    root = tmp_path / "root"
    for state in ("wheels", "current"):
        env_task.run(wish(root, locks[0], pin, state=state, wheelhouse=str(folder)), False, print)
    assert in_service(root) == "1.0"
    return root


@pytest.fixture
def head(tmp_path, house):
    """The head's wheels of both versions, served on loopback for as long as the test runs; gives the ports."""
    folder, locks, pin = house
    servers = []
    for lock in locks:
        plan = env_task.make_plan(wish(tmp_path / "head", lock, pin))
        wheels.take(plan.wheels, plan.wanted, folder, plan.lock, sys.executable, print)
        server = model_copy.Server("127.0.0.1", 0, "s", plan.wheels.path, 10**6)
        server.handle_error = lambda *_: None  # peers are killed while it sends
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        servers.append(server)
    yield [server.server_address[1] for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_killed_at_random_points_it_is_never_a_half_environment_and_the_next_run_repairs(node, house, head):
    _, locks, pin = house
    chance = random.Random(6)
    longest, found, kills, now = 1.0, {"old": 0, "new": 0}, 0, 0
    while kills < KILLS:
        now = 1 - now
        before, after = f"{2 - now}.0", f"{1 + now}.0"
        # An environment that is complete would be switched to at once: each round begins without the other one.
        other = env_task.make_plan(wish(node, locks[now], pin))
        shutil.rmtree(other.path, ignore_errors=True)
        wanted = wish(node, locks[now], pin, port=head[now])
        for _ in range(3):
            process = drive(node, wanted, "copied", "current")
            time.sleep(chance.uniform(0.05, longest))
            # Ansible's module and uv die together, as in a power cut.
            if process.poll() is None:
                os.killpg(process.pid, 9)
                kills += 1
            process.communicate()
            version = in_service(node)
            found["new" if version == after else "old"] += 1
            assert version in (before, after)
        started = time.monotonic()
        process = drive(node, wanted, "copied", "current")
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said
        longest = max(longest, 1.1 * (time.monotonic() - started))
        assert in_service(node) == after
        assert not list((node / "envs").glob(".*")), "leftovers"
    print(f"{kills} kills within {longest:.1f} s of the start; then in service: {found}")
    assert found["old"]


def test_two_nodes_that_got_the_wheels_at_different_times_have_the_same_contents(node, house, tmp_path):
    _, locks, pin = house
    first = env.read_manifest(node / "envs" / env.current_name(node))
    other = tmp_path / "other"
    plan = env_task.make_plan(wish(other, locks[0], pin))
    shutil.copytree(env_task.make_plan(wish(node, locks[0], pin)).wheels.path, plan.wheels.path)
    second = env_task.run(wish(other, locks[0], pin), False, print)["manifest"]
    assert first == second


def test_the_installer_alone_killed_is_a_failure_that_leaves_what_runs(node, house, head):
    _, locks, pin = house
    plan = env_task.make_plan(wish(node, locks[1], pin))
    wheels.copy(plan.wheels, "127.0.0.1", head[1], "s", 2, print)
    real = env.ensure_uv(plan, None)
    kept = real.read_bytes()
    real.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(env.EnvError, match="exit -9"):
        env.install(plan)
    assert in_service(node) == "1.0" and not list((node / "envs").glob(".*"))
    real.write_bytes(kept)
    env.install(plan)


def test_a_full_disk_leaves_what_runs(tmp_path, house):
    """A real file system of a few megabytes, in a mount namespace of this test's own."""
    folder, locks, pin = house
    root = tmp_path / "root"
    root.mkdir()
    script = f"""
set -e
mount -t tmpfs -o size=160m tmpfs {root}
run() {{ {sys.executable} -c "$DRIVER" {ROOT / "module_utils"} {tmp_path / "releases"} "$@"; }}
run "$FIRST" wheels current
head -c 200m /dev/zero > {root}/filler 2>/dev/null || true
for n in $(seq 14); do
  truncate -s -1M {root}/filler
  if run "$SECOND" wheels current > {tmp_path}/said 2>&1; then break; fi
  tail -n 1 {tmp_path}/said
  {root}/current/bin/python -I -c "import importlib.metadata as m; assert m.version('vllm') == '1.0'"
  echo "refused, 1.0 in service"
done
rm {root}/filler
run "$SECOND" wheels current
{root}/current/bin/python -I -c "import importlib.metadata as m; assert m.version('vllm') == '2.0'"
echo "2.0 in service"
"""
    variables = {
        **os.environ, "DRIVER": DRIVER.replace("env.RELEASES", "env.SPACE_FACTOR = 0\nenv.RELEASES", 1),
        "FIRST": json.dumps(wish(root, locks[0], pin, wheelhouse=str(folder))),
        "SECOND": json.dumps(wish(root, locks[1], pin, wheelhouse=str(folder))),
    }  # fmt: skip
    inside = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", root], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets the test mount nothing")
    done = subprocess.run([*inside, "bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused, 1.0 in service") >= 3, done.stdout
    assert "No space left on device" in done.stdout or "the disk is full" in done.stdout, done.stdout
    assert done.stdout.endswith("2.0 in service\n")


def test_a_wheelhouse_that_lacks_a_wheel_or_holds_a_changed_one_names_it(tmp_path, house):
    folder, locks, pin = house
    own = tmp_path / "house"
    shutil.copytree(folder, own)
    (own / "torch-2.0-py3-none-any.whl").write_bytes(b"damaged")
    (own / "filler_3-2.0-py3-none-any.whl").unlink()
    plan = env_task.make_plan(wish(tmp_path / "root", locks[1], pin))
    arguments = (plan.wheels, plan.wanted, own, plan.lock, sys.executable, print)
    with pytest.raises(
        wheel_download.WheelError, match=r"without 2 of the 15 locked wheels \(torch==2.0, filler-3==2.0\)"
    ):
        wheels.take(*arguments)
    assert wheels.read(plan.wheels, plan.wanted) is None
    for wheel in folder.glob("*.whl"):
        shutil.copy(wheel, own)
    wheels.take(*arguments)
    assert wheels.read(plan.wheels, plan.wanted)
    assert not list(plan.wheels.path.glob("*-1.0-*")), "wheels of another lock"


def test_a_new_lock_takes_the_wheels_that_it_shares_without_a_download(tmp_path, house, monkeypatch):
    folder, locks, pin = house
    first = env_task.make_plan(wish(tmp_path / "root", locks[0], pin))
    wheels.take(first.wheels, first.wanted, folder, first.lock, sys.executable, print)
    requirements = (
        *first.lock.requirements[1:],
        env_task.make_plan(wish(tmp_path, locks[1], pin)).lock.requirements[0],
    )
    second = env_task.make_plan(
        wish(tmp_path / "root", render_lock(Lock("1.0", *_facts(first), requirements), ""), pin)
    )
    asked = []

    def download(pip, wanted, lock, target, say):
        asked.extend(f"{r.name}=={r.version}" for r in wanted)
        shutil.copy(folder / "torch-2.0-py3-none-any.whl", target)

    monkeypatch.setattr(wheels, "_venv_with_pip", lambda *_: ["pip"])
    monkeypatch.setattr(wheel_download, "download", download)
    wheels.take(second.wheels, second.wanted, None, second.lock, sys.executable, print)
    assert asked == ["torch==2.0"]


def _facts(plan: env.Plan) -> tuple[str, str, tuple[int, int], int]:
    return plan.lock.python, plan.lock.machine, plan.lock.glibc, plan.lock.download
