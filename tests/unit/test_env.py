"""The environment's life: built aside, proven, put in place, switched; whatever breaks, what runs stays."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import env
from ansible.module_utils.sparkpair.env_lock import LockError, Requirement, parse_lock

FAKE_UV = """#!/bin/sh
# A stand-in for uv: writes down what it was asked, and breaks as $FAKE_UV says.
echo "$@" >> "$FAKE_LOG"
case "$1 $2" in
"venv "*)
  for last; do :; done
  mkdir -p "$last/bin"
  cat > "$last/bin/python" <<'PYTHON'
#!/bin/sh
echo 'a line of noise'
site=$(dirname "$(dirname "$0")")/lib/python3/site-packages
echo "PROOF {\\"vllm\\": \\"${FAKE_VLLM:-1.0}\\", \\"torch\\": \\"2\\", \\"cuda\\": \\"13.0\\",\\
 \\"capabilities\\": {\\"nnodes\\": ${FAKE_NNODES:-true}}, \\"site_packages\\": \\"$site\\"}"
PYTHON
  chmod +x "$last/bin/python" ;;
"pip sync")
  case "$FAKE_UV" in
  hash) echo "error: Hash mismatch for torch" >&2; exit 1 ;;
  full) echo "error: failed to write: No space left on device (os error 28)" >&2; exit 2 ;;
  killed) kill -9 $PPID; exit 9 ;;
  esac ;;
esac
"""


def header(**changes):
    facts = env.inspect_python(sys.executable)
    values = {"python": facts.minor, "machine": facts.machine, "glibc": "2_17", **changes}
    platform = f"{values['machine']}-manylinux_{values['glibc']}"
    return f"# sparkpair-lock vllm=1.0 python={values['python']} platform={platform} download=10"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan that installs with the fake uv, whose wheel is in place."""
    house = tmp_path / "house"
    house.mkdir()
    python = env.inspect_python(sys.executable)
    wheel = house / f"uv-9.9-py3-none-manylinux_2_17_{python.machine}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("uv-9.9.data/scripts/uv", FAKE_UV)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.log"))
    text = f"{header()}\nvllm==1.0 --hash=sha256:{'a' * 64}\n"
    made = env.Plan(
        root=tmp_path / "root",
        lock=parse_lock(text),
        lock_text=text,
        uv=Requirement("uv", "9.9", (hashlib.sha256(wheel.read_bytes()).hexdigest(),)),
        python=python,
        log=tmp_path / "log" / "env.log",
    )
    shutil.copytree(house, made.wheels.path)
    monkeypatch.setattr(env, "RELEASES", tmp_path / "releases")
    return made


def another(plan, comment):
    """The same plan for another lock, so another environment."""
    text = f"{header()}\n# {comment}\nvllm==1.0 --hash=sha256:{'a' * 64}\n"
    made = env.Plan(**{**vars(plan), "lock": parse_lock(text), "lock_text": text})
    shutil.copytree(plan.wheels.path, made.wheels.path)
    return made


def envs(plan):
    return sorted(p.name for p in (plan.root / "envs").iterdir())


def test_a_new_environment_is_proven_and_put_in_place(plan, tmp_path):
    manifest = env.install(plan)
    env.switch(plan)
    assert (manifest["vllm"], manifest["site_packages"]) == ("1.0", "lib/python3/site-packages")
    assert env.read_manifest(plan.path) == manifest
    assert envs(plan) == [plan.digest]
    assert env.current_name(plan.root) == plan.digest
    assert (plan.root / "current").resolve() == plan.path
    asked = (tmp_path / "fake.log").read_text()
    for option in ("--relocatable", "--require-hashes", "--no-build", "--compile-bytecode", "--offline --no-index"):
        assert option in asked
    said = plan.log.read_text()
    assert "3/4 1 wheels" in said
    assert "done:" in said


def test_an_environment_that_is_there_is_left_alone(plan, tmp_path):
    env.install(plan)
    asked = (tmp_path / "fake.log").read_text()
    assert env.install(plan)["digest"] == plan.digest
    assert (tmp_path / "fake.log").read_text() == asked


@pytest.mark.parametrize(
    ("how", "complaint"), [("hash", "a wheel is not the locked one"), ("full", "the disk is full")]
)
def test_a_failed_installation_leaves_what_runs_and_the_next_repairs(plan, monkeypatch, how, complaint):
    env.install(plan)
    env.switch(plan)
    newer = another(plan, "newer")
    monkeypatch.setenv("FAKE_UV", how)
    with pytest.raises(env.EnvError, match=complaint) as caught:
        env.install(newer)
    assert str(newer.log) in str(caught.value)
    assert envs(plan) == [plan.digest]
    assert env.current_name(plan.root) == plan.digest

    monkeypatch.delenv("FAKE_UV")
    env.install(newer)
    env.switch(newer)
    assert env.current_name(plan.root) == newer.digest
    assert env.read_manifest(plan.path), "the one before is still there"


def test_a_killed_installation_leaves_what_runs_and_the_next_repairs(plan, monkeypatch):
    env.install(plan)
    env.switch(plan)
    newer = another(plan, "newer")
    monkeypatch.setenv("FAKE_UV", "killed")
    process = multiprocessing.get_context("fork").Process(target=env.install, args=(newer,))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    assert envs(plan) == sorted([newer.partial.name, plan.digest])
    assert env.read_manifest(newer.path) is None
    assert env.current_name(plan.root) == plan.digest

    monkeypatch.delenv("FAKE_UV")
    env.install(newer)
    assert envs(plan) == sorted([newer.digest, plan.digest])


def test_a_broken_environment_is_replaced(plan):
    env.install(plan)
    (plan.path / "bin" / "python").unlink()
    (plan.path / "stray").touch()
    assert env.read_manifest(plan.path) is None
    env.install(plan)
    assert env.read_manifest(plan.path)
    assert not (plan.path / "stray").exists()


def test_a_lost_file_is_noticed_said_and_mended(module, plan, warnings):
    module()
    (plan.path / "requirements.txt").unlink()
    assert module(check=True)["changed"]
    assert module()["changed"]
    assert (plan.path / "requirements.txt").exists()
    why = "found 1 files that differ from what was installed: missing requirements.txt"
    assert [why in warning for warning in warnings] == [True, True]
    assert f"rebuilding {plan.path}: {why}" in plan.log.read_text()
    assert not module()["changed"]


def test_a_complete_environment_is_rebuilt_on_request(module, plan):
    module()
    first = plan.path.stat().st_ino
    assert module(check=True, rebuild=True)["changed"]
    assert plan.path.stat().st_ino == first
    assert module(rebuild=True)["changed"]
    assert plan.path.stat().st_ino != first
    assert "vllm_env_rebuild is true" in plan.log.read_text()


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_in_the_place_of_the_symlink_is_said_before_anything_is_built(module, plan, check):
    (plan.root / "current").mkdir()
    assert "expected a symlink" in module(check=check)["msg"]
    assert sorted(path.name for path in plan.root.iterdir()) == ["current", "wheels"]


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("FAKE_VLLM", "0.9", "imports vLLM 0.9, the lock has 1.0"),
        ("FAKE_NNODES", "false", "cannot serve over two nodes"),
    ],
)
def test_an_environment_that_proves_something_else_is_refused(plan, monkeypatch, variable, value, complaint):
    monkeypatch.setenv(variable, value)
    with pytest.raises(env.EnvError, match=complaint):
        env.install(plan)
    assert envs(plan) == []


def test_no_space_is_said_before_anything_is_written(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "SPACE_FACTOR", 10**18)
    with pytest.raises(env.EnvError, match="GB free, the environment wants"):
        env.install(plan)
    assert not (tmp_path / "fake.log").exists()


def test_an_installer_with_another_hash_is_refused(plan):
    next(plan.wheels.path.iterdir()).write_bytes(b"something else")
    with pytest.raises(env.EnvError, match="not the pinned one"):
        env.install(plan)


def test_a_wheelhouse_without_the_installer_is_named(plan):
    next(plan.wheels.path.iterdir()).unlink()
    with pytest.raises(env.EnvError, match=r"no wheel uv-9\.9-"):
        env.install(plan)


@pytest.mark.parametrize("change", [{"python": "3.7"}, {"machine": "riscv64"}, {"glibc": "9_99"}])
def test_a_lock_for_another_node_is_refused(plan, change):
    lock = parse_lock(f"{header(**change)}\nvllm==1.0 --hash=sha256:{'a' * 64}\n")
    with pytest.raises(env.EnvError, match=r"the lock is for Python .* this node has Python"):
        env.require_fit(lock, plan.python)


@pytest.mark.parametrize("path", ["/nowhere/python3", "/bin/true"])
def test_what_is_no_python_is_refused(path):
    with pytest.raises(env.EnvError, match="no usable Python"):
        env.inspect_python(path)


def test_a_folder_in_the_place_of_the_symlink_is_never_replaced(plan):
    env.install(plan)
    (plan.root / "current").mkdir()
    with pytest.raises(env.EnvError, match="expected a symlink"):
        env.switch(plan)


def test_two_installations_do_not_meet(plan, monkeypatch):
    monkeypatch.setattr(env, "LOCK_WAIT", 0.0)
    with env.only_one(plan.root), pytest.raises(env.EnvError, match="another installation"), env.only_one(plan.root):
        pass
    with env.only_one(plan.root):
        pass


class Exit(Exception):
    pass


@pytest.fixture
def warnings(monkeypatch):
    """What the module warned of."""
    from ansible.module_utils import basic

    said = []
    monkeypatch.setattr(basic.AnsibleModule, "warn", lambda _, text: said.append(text))
    return said


@pytest.fixture
def module(plan, monkeypatch):
    """Run the Ansible module with the plan's arguments; return its result."""
    import vllm_env
    from ansible.module_utils import basic
    from ansible.module_utils.testing import patch_module_args

    def leave(_, **result):
        raise Exit(result)

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", leave)

    def run(check=False, **changes):
        arguments = {
            "lock": plan.lock_text, "uv_lock": plan.uv.line(), "root": str(plan.root), "python": sys.executable,
            "log": str(plan.log), "_ansible_check_mode": check, **changes,
        }  # fmt: skip
        with patch_module_args(arguments), pytest.raises(Exit) as caught:
            vllm_env.main()
        return caught.value.args[0]

    return run


def test_the_module_predicts_installs_and_is_idempotent(module, plan):
    predicted = module(check=True)
    assert (predicted["changed"], predicted["digest"]) == (True, plan.digest)
    assert [path.name for path in plan.root.iterdir()] == ["wheels"]
    assert module()["changed"]
    assert env.current_name(plan.root) == plan.digest
    again = module()
    assert not again["changed"]
    assert again["manifest"]["vllm"] == again["vllm_version"] == "1.0"
    (plan.root / "current").unlink()
    assert module(check=True)["changed"]


def test_the_module_refuses_what_is_no_lock(module):
    assert "not a pinned requirement" in module(lock=f"{header()}\nvllm>1\n")["msg"]


def test_the_manifest_is_readable_by_everyone(plan):
    os.umask(0o077)
    env.install(plan)
    assert (plan.path / env.MANIFEST).stat().st_mode & 0o777 == 0o644
    assert json.loads((plan.path / env.MANIFEST).read_text())["digest"] == plan.digest
    assert plan.path.stat().st_mode & 0o777 == 0o755


def test_old_environments_go_and_what_is_in_service_stays(module, plan, tmp_path, monkeypatch):
    plans = [another(plan, name) for name in ("oldest", "older", "served", "newest")]
    for number, each in enumerate(plans):
        env.install(each)
        os.utime(each.path / env.MANIFEST, (number, number))
        shutil.rmtree(each.wheels.path)
    env.switch(plans[-1])
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / f"{plans[2].digest}.json").touch()
    monkeypatch.setattr(env, "in_use", lambda folder: folder.name == plans[1].digest)
    (plan.root / "envs" / ".partial-dead").mkdir()
    (plan.root / "wheels" / "another").mkdir()

    assert module(check=True, keep=1)["changed"]
    assert plans[0].path.exists()
    result = module(keep=1)
    assert plans[0].digest in result["diff"]["before"]
    # The planned one, one other (that which was last in service), and what a process runs from.
    assert envs(plan) == sorted([plan.digest, plans[1].digest, plans[2].digest])
    assert [path.name for path in (plan.root / "wheels").iterdir()] == [plan.digest]
    monkeypatch.setattr(env, "in_use", lambda _: False)
    assert module(keep=1)["changed"]
    assert not module(keep=1)["changed"]


MOUNTS = "/dev/nvme0n1p2 / ext4 rw 0 0\nnas:/opt /opt nfs4 rw 0 0\n/dev/sda1 /opt/sparkpair xfs rw 0 0\n"


@pytest.mark.parametrize(
    ("path", "shared"), [("/opt/other", True), ("/opt/sparkpair/envs", False), ("/var/cache", False)]
)
def test_a_folder_that_nodes_share_is_refused(path, shared):
    if shared:
        with pytest.raises(env.EnvError, match="found /opt/other on nfs4, expected a disk of this node"):
            env.require_local(Path(path), MOUNTS)
    else:
        env.require_local(Path(path), MOUNTS)


def test_a_process_that_was_started_from_an_environment_is_found(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"/opt/envs/abc/bin/python\0/opt/current/bin/vllm\0serve\0")
    assert env.in_use(Path("/opt/envs/abc"), tmp_path)
    assert not env.in_use(Path("/opt/envs/ab"), tmp_path)


def test_explanations_end_in_a_remedy():
    assert "free space" in env.explain(["error: No space left on device (os error 28)"])
    assert env.explain(["?"]) == "the installer failed"
    assert issubclass(LockError, ValueError)
    assert Path(env.__file__).name == "env.py"
