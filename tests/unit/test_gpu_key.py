"""A repository's key is trusted by its fingerprint alone; files are replaced in one step; the memory policy."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess

import apt_key_source
import pytest
from ansible.module_utils.sparkpair import files, memory
from ansible.module_utils.sparkpair.openpgp import KeyFileError, dearmor, fingerprint, read_packets, same
from ansible.module_utils.testing import patch_module_args
from hypothesis import given
from hypothesis import strategies as st

from lab import apt_repository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not (shutil.which("gpg") and shutil.which("dpkg-deb")):
        pytest.skip("gpg makes the key")
    return apt_repository.build(tmp_path_factory.mktemp("key") / "apt")


@pytest.fixture(scope="module")
def key(repository):
    return (repository / "key.asc").read_text()


@pytest.fixture(scope="module")
def expected(repository):
    return (repository / "key.fingerprint").read_text().strip()


def run(capsys, **arguments):
    """The module's result."""
    with patch_module_args(arguments), pytest.raises(SystemExit):
        apt_key_source.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_fingerprint_is_the_one_that_gpg_finds(key, expected):
    assert fingerprint(dearmor(key.encode())) == expected
    spaced = " ".join(expected[at : at + 4] for at in range(0, 40, 4)).lower()
    assert same(expected, spaced) and not same(expected, expected[-16:]) and not same("", "")


def test_damage_is_refused(key):
    middle = len(key) // 2
    swapped = key[:middle] + ("A" if key[middle] != "A" else "B") + key[middle + 1 :]
    for damaged in (swapped, key[:-40], key.replace("PUBLIC", "PRIVATE"), "", "hello"):
        with pytest.raises(KeyFileError):
            fingerprint(dearmor(damaged.encode()))
    with pytest.raises(KeyFileError, match="2 public keys"):
        fingerprint(dearmor(key.encode()) * 2)
    with pytest.raises(KeyFileError, match="private"):
        fingerprint(bytes([0xC5, 1, 4]))


def test_the_module_writes_once_and_takes_back(capsys, tmp_path, key, expected):
    arguments = {"name": "x", "uri": "file:/srv", "key": key, "fingerprint": expected, "root": str(tmp_path)}
    predicted = run(capsys, **arguments, _ansible_check_mode=True)
    assert predicted["changed"] and not list(tmp_path.iterdir())
    first = run(capsys, **arguments)
    assert first["changed"] and first["diff"] == predicted["diff"]
    assert (tmp_path / "keyrings/x.gpg").read_bytes() == dearmor(key.encode())
    assert f"Signed-By: {tmp_path}/keyrings/x.gpg" in (tmp_path / "sources.list.d/x.sources").read_text()
    assert not run(capsys, **arguments)["changed"]
    assert run(capsys, name="x", root=str(tmp_path))["changed"]
    assert not run(capsys, name="x", root=str(tmp_path))["changed"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("wrong", ["", "0" * 40, "short"])
def test_another_fingerprint_changes_nothing(capsys, tmp_path, key, wrong):
    result = run(capsys, name="x", uri="file:/srv", key=key, fingerprint=wrong, root=str(tmp_path))
    assert result["failed"] and "gpu_apt_fingerprint" in result["msg"] and not list(tmp_path.iterdir())


def test_a_key_file_that_is_not_there(capsys, tmp_path):
    result = run(
        capsys, name="x", uri="file:/srv", key=str(tmp_path / "none"), fingerprint="0" * 40, root=str(tmp_path)
    )
    assert result["failed"] and "no file" in result["msg"]


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: b"\xc6" + data))
def test_no_bytes_make_the_parser_raise_anything_else(data):
    with contextlib.suppress(KeyFileError):
        list(read_packets(data))
    with contextlib.suppress(KeyFileError):
        fingerprint(dearmor(data))
    with contextlib.suppress(KeyFileError):
        dearmor(b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n" + data + b"\n-----END PGP PUBLIC KEY BLOCK-----")


def test_gpgv_agrees(repository, key, tmp_path):
    (tmp_path / "ring").write_bytes(dearmor(key.encode()))
    command = ["gpgv", "--keyring", str(tmp_path / "ring"), str(repository / "InRelease")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "a/file"
    files.put(path, b"old")
    assert not files.differs(path, b"old") and files.differs(path, b"old", 0o600) and files.differs(path, None)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.put(path, b"new")
    assert path.read_bytes() == b"old" and [entry.name for entry in path.parent.iterdir()] == ["file"]


DEFAULT = memory.Policy(1, "-m 2 -s 80", True, True)


def test_the_memory_policy_configures_earlyoom_only_where_it_is(tmp_path):
    assert memory.EARLYOOM not in memory.wanted(DEFAULT, tmp_path)
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / memory.EARLYOOM).write_text('# by the package\nEARLYOOM_ARGS="-r 3600"\nOTHER=1')
    new = memory.wanted(DEFAULT, tmp_path)[memory.EARLYOOM]
    assert new == b'# by the package\nEARLYOOM_ARGS="-m 2 -s 80"\nOTHER=1'
    assert memory.set_earlyoom("A=1", "-m 2") == 'A=1\nEARLYOOM_ARGS="-m 2"\n'


def test_a_policy_of_leaving_alone_removes_what_was_ours(tmp_path):
    assert set(memory.wanted(memory.Policy(-1, "", False, False), tmp_path).values()) == {None}
    units = memory.wanted(memory.Policy(1, "", True, True, "other"), tmp_path)
    assert b"SocketUser=other\n" in (units[memory.PAGE_CACHE_SOCKET] or b"")


def test_a_kernel_that_forgot_its_swappiness_is_seen(tmp_path):
    assert not memory.swappiness_drifted(DEFAULT, tmp_path)
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / memory.SWAPPINESS).write_text("60\n")
    assert memory.swappiness_drifted(DEFAULT, tmp_path)
    assert not memory.swappiness_drifted(memory.Policy(60, "", True, True), tmp_path)
