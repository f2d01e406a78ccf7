"""The locks themselves, and the code that reads, makes and serves them."""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair.env_lock import LockError, env_digest, parse_lock, parse_requirements, render_lock

from lab import wheelhouse
from locks import lock as make_lock
from module_utils.sparkpair import wheel_download

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted(p for p in (ROOT / "locks").glob("*.txt") if p.name != "uv.txt")
SPARK_LOCKS = [p for p in LOCKS if p.name.endswith("-aarch64-cu130.txt")]
HASH = "a" * 64
HEADER = "# sparkpair-lock vllm=1.0 python=3.11 platform=x86_64-manylinux_2_36 download=10"


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.name)
def test_every_lock_is_complete_and_says_what_it_is_for(path):
    lock = parse_lock(path.read_text(encoding="ascii"))
    version, _, profile = path.stem.partition("-")
    assert lock.vllm == version
    assert lock.version_of("vllm").partition("+")[0] == version
    assert (lock.machine, lock.python) == (make_lock.PROFILES[profile].machine, make_lock.PROFILES[profile].python)
    assert lock.download > 100e6
    for needed in ("torch", "transformers", "huggingface-hub", "numpy", "uvicorn"):
        assert lock.version_of(needed), f"{needed} is not locked"


@pytest.mark.parametrize("path", sorted((ROOT / "locks").iterdir()), ids=lambda p: p.name)
def test_no_file_of_the_locks_names_an_index(path):
    if path.suffix in (".txt", ".in"):
        assert not re.search(r"https?:|--(extra-)?index|--find-links|file:", path.read_text(encoding="ascii"))


@pytest.mark.parametrize("path", SPARK_LOCKS, ids=lambda p: p.name)
def test_a_spark_lock_compiles_for_its_driver(path):
    lock = parse_lock(path.read_text(encoding="ascii"))
    pieces = {
        r.name: r.version
        for r in lock.requirements
        if re.match(r"cuda-(python|bindings|toolkit)$|nvidia-cuda-", r.name)
    }
    pieces |= {name: lock.version_of(name) for name in ("nvidia-nvjitlink", "nvidia-nvvm")}
    assert "nvidia-cuda-nvcc" in pieces
    assert {name: v for name, v in pieces.items() if not v.startswith("13.0.")} == {}


@pytest.mark.parametrize("path", SPARK_LOCKS, ids=lambda p: p.name)
def test_the_companions_of_torch_are_in_step(path):
    lock = parse_lock(path.read_text(encoding="ascii"))
    torch, vision = (tuple(map(int, lock.version_of(n).split(".")[:2])) for n in ("torch", "torchvision"))
    # torchvision 0.N is built for torch 2.(N-15); the audio package has had its last release and binds to torch's
    # stable interface, so vLLM's own pin stands.
    assert (vision[0], vision[1] - 15) == (torch[0] - 2, torch[1])
    assert lock.version_of("torchaudio") == "2.11.0"


def test_the_installer_is_pinned_for_every_machine_and_is_the_one_of_the_controller():
    pins = parse_requirements((ROOT / "locks" / "uv.txt").read_text(encoding="ascii"))
    assert [r.name for r in pins] == ["uv"]
    assert len(pins[0].hashes) >= 2
    assert f"uv=={pins[0].version}" in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("aiohttp>=3", "not a pinned"),
        ("aiohttp==3.1", "not a pinned"),
        (f"aiohttp==3.1 --hash=sha256:{HASH[:-1]}", "not a pinned"),
        (f"aiohttp==3.1 --hash=md5:{HASH[:32]}", "not a pinned"),
        (f"aiohttp==3.1 ; python_version > '3' --hash=sha256:{HASH}", "not a pinned"),
        (f"aiohttp[speed]==3.1 --hash=sha256:{HASH}", "not a pinned"),
        ("--index-url https://example.invalid", "not a pinned"),
        ("-r other.txt", "not a pinned"),
        (f"# a comment that swallows a line \\\nevil==1 --hash=sha256:{HASH}\nok==1 --hash=sha256:{HASH}", "backslash"),
        ("", "no requirement"),
        (f"a_b==1 --hash=sha256:{HASH}\nA.b==1 --hash=sha256:{HASH}", "locked twice"),
    ],
)
def test_what_is_no_lock_is_refused(line, complaint):
    with pytest.raises(LockError, match=complaint):
        parse_lock(f"{HEADER}\n{line}\n")


def test_a_lock_without_its_first_line_is_refused():
    with pytest.raises(LockError, match="first line"):
        parse_lock(f"aiohttp==3.1 --hash=sha256:{HASH}\n")


def test_a_rendered_lock_parses_to_itself():
    lock = parse_lock(
        f"{HEADER}\nb==1 --hash=sha256:{HASH} \\\n  --hash=sha256:{'b' * 64}\nvllm==1.0+cpu --hash=sha256:{HASH}\n"
    )
    assert parse_lock(render_lock(lock, "two\nnotes")) == lock
    assert lock.version_of("VLLM") == "1.0+cpu"
    assert lock.version_of("nope") is None


def test_the_digest_changes_with_lock_python_and_machine_only():
    digest = env_digest("text", "3.12", "aarch64")
    assert re.fullmatch(r"[0-9a-f]{16}", digest)
    others = {
        env_digest("text ", "3.12", "aarch64"),
        env_digest("text", "3.11", "aarch64"),
        env_digest("text", "3.12", "x86_64"),
    }
    assert digest not in others
    assert digest == env_digest("text", "3.12", "aarch64")


def test_a_lock_is_made_from_what_the_resolver_found(tmp_path):
    wheel = tmp_path / "c-1-py3-none-any.whl"
    wheel.write_bytes(b"12345")
    (tmp_path / "pylock.toml").write_text(
        f"""
        [[packages]]
        name = "B_x"
        version = "2"
        wheels = [{{ url = "https://example.invalid/b.whl", size = 7, hashes = {{ sha256 = "{"b" * 64}" }} }},
                  {{ url = "https://example.invalid/b2.whl", size = 9, hashes = {{ sha256 = "{"c" * 64}" }} }}]
        [[packages]]
        name = "a"
        version = "1"
        wheels = [{{ path = "{wheel.name}", hashes = {{ sha256 = "{HASH}" }} }}]
        """,
        encoding="utf-8",
    )
    lock = make_lock.lock_of(make_lock.PROFILES["x86_64-cpu"], "1.0", tmp_path)
    assert [(r.name, r.version) for r in lock.requirements] == [("a", "1"), ("b-x", "2")]
    assert lock.download == 9 + 5


def test_a_package_without_a_wheel_is_refused(tmp_path):
    (tmp_path / "pylock.toml").write_text('[[packages]]\nname = "a"\nversion = "1"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no wheel"):
        make_lock.lock_of(make_lock.PROFILES["x86_64-cpu"], "1.0", tmp_path)


def test_the_shim_is_the_locked_one_and_only_metadata(tmp_path):
    lock = parse_lock(wheelhouse.LOCK.read_text(encoding="ascii"))
    name, data = wheelhouse.shim(lock.version_of("vllm"))
    (pin,) = [r for r in lock.requirements if r.name == "vllm"]
    assert pin.hashes == (hashlib.sha256(data).hexdigest(),)
    (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / name) as wheel:
        assert all(".dist-info/" in member for member in wheel.namelist())


@pytest.fixture
def small_wheelhouse(tmp_path, monkeypatch):
    """A lock of two wheels and a download that 'fetches' them (the content is the name)."""
    wheels = {"a": b"wheel of a", "uv": b"wheel of uv"}
    _, data = wheelhouse.shim("1.0+cpu")
    hashes = {n: hashlib.sha256(content).hexdigest() for n, content in {**wheels, "vllm": data}.items()}
    lock, uv_lock = tmp_path / "lock.txt", tmp_path / "uv.txt"
    lock.write_text(
        f"{HEADER}\na==1 --hash=sha256:{hashes['a']}\nvllm==1.0+cpu --hash=sha256:{hashes['vllm']}\n", encoding="ascii"
    )
    uv_lock.write_text(f"uv==2 --hash=sha256:{hashes['uv']} --hash=sha256:{HASH}\n", encoding="ascii")
    monkeypatch.setattr(wheelhouse, "LOCK", lock)
    monkeypatch.setattr(wheelhouse, "UV_LOCK", uv_lock)

    public = tmp_path / "public.txt"
    public.write_text(
        lock.read_text(encoding="ascii").replace(f"{HEADER}\n", f"{HEADER}\n# public\n"), encoding="ascii"
    )
    monkeypatch.setattr(wheelhouse, "PUBLIC_LOCK", public)

    def download(requirements, lock, folder):
        for r in requirements:
            (folder / f"{r.name}-{r.version}-py3-none-any.whl").write_bytes(wheels[r.name])

    monkeypatch.setattr(wheelhouse, "download", download)
    return wheels


def test_the_wheelhouse_is_complete_or_absent(tmp_path, small_wheelhouse):
    small_wheelhouse["a"] = b"another wheel of a"
    with pytest.raises(wheelhouse.WheelhouseError, match=r"a-1-py3-none-any.whl is no locked wheel"):
        wheelhouse.build(tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".partial"]

    small_wheelhouse["a"] = b"wheel of a"
    folder = wheelhouse.build(tmp_path / "cache")
    assert sorted(p.name for p in folder.glob("*.whl")) == [
        "a-1-py3-none-any.whl", "uv-2-py3-none-any.whl", "vllm-1.0+cpu-py3-none-any.whl",
    ]  # fmt: skip
    assert list((tmp_path / "cache").iterdir()) == [folder]
    assert wheelhouse.lock_name(folder) == "lock.txt"


def test_without_the_cpu_build_of_torch_the_public_one_is_taken(tmp_path, small_wheelhouse, monkeypatch):
    once = wheelhouse.download
    asked = []

    def download(requirements, lock, folder):
        asked.append(folder)
        if len(asked) == 1:
            raise wheelhouse.NotOnIndexError("ERROR: No matching distribution found for torch==2.13.0+cpu")
        once(requirements, lock, folder)

    monkeypatch.setattr(wheelhouse, "download", download)
    folder = wheelhouse.build(tmp_path / "cache")
    assert wheelhouse.lock_name(folder) == "public.txt"
    assert list((tmp_path / "cache").iterdir()) == [folder]
    assert wheelhouse.build(tmp_path / "cache") == folder


def test_pip_that_finds_no_wheel_is_told_from_one_that_breaks(tmp_path, monkeypatch):
    lock = parse_lock(f"{HEADER}\na==1 --hash=sha256:{HASH}\n")
    pip = tmp_path / "pip"
    monkeypatch.setattr(wheelhouse, "pip_python", lambda: str(pip))
    for said, error in (
        ("ERROR: No matching distribution found for a==1", wheelhouse.NotOnIndexError),
        ("ERROR: connection broken", wheelhouse.WheelhouseError),
    ):
        pip.write_text(f"#!/bin/sh\necho Collecting a\necho '{said}'\nexit 1\n")
        pip.chmod(0o755)
        with pytest.raises(wheelhouse.WheelhouseError, match=said) as caught:
            wheelhouse.download(list(lock.requirements), lock, tmp_path)
        assert type(caught.value) is error


def test_a_finished_wheelhouse_is_not_downloaded_again(tmp_path, small_wheelhouse):
    folder = wheelhouse.build(tmp_path / "cache")
    small_wheelhouse.clear()
    assert wheelhouse.build(tmp_path / "cache") == folder


def test_a_missing_wheel_is_named(tmp_path, small_wheelhouse, monkeypatch):
    monkeypatch.setattr(wheelhouse, "download", lambda *_: None)
    with pytest.raises(wheelhouse.WheelhouseError, match="still missing: a, uv"):
        wheelhouse.build(tmp_path / "cache")


def test_pip_is_asked_for_the_platform_of_the_nodes():
    lock = parse_lock(wheelhouse.LOCK.read_text(encoding="ascii"))
    tags = wheel_download.platform_tags(lock)
    assert tags[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64"} <= set(tags)
    assert "manylinux_2_37_x86_64" not in tags
