"""The simulated apt repository: the same bytes at every build, honest about what it is, a driver as a trap."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess

import pytest
from ansible.module_utils.sparkpair import openpgp

from lab import apt_repository

pytestmark = pytest.mark.skipif(
    not (shutil.which("dpkg-deb") and shutil.which("gpg")), reason="dpkg-deb and gpg build the repository"
)
SIGNED = {"InRelease", "key.asc", "key.fingerprint"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return apt_repository.build(tmp_path_factory.mktemp("one") / "apt")


def test_two_builds_are_equal_but_for_the_key(repository, tmp_path):
    again = apt_repository.build(tmp_path / "apt")
    one, two = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (repository, again))
    assert set(one) == set(two) and {name for name in one if one[name] != two[name]} == SIGNED


def test_the_release_is_signed_by_the_key_that_lies_beside_it(repository, tmp_path):
    packets = openpgp.dearmor((repository / "key.asc").read_bytes())
    assert openpgp.fingerprint(packets) == (repository / "key.fingerprint").read_text().strip()
    (tmp_path / "ring.gpg").write_bytes(packets)
    command = ["gpgv", "--keyring", str(tmp_path / "ring.gpg"), str(repository / "InRelease")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert (repository / "Release").read_text().strip() in (repository / "InRelease").read_text()


def test_a_build_replaces_what_was_there_and_leaves_no_scratch(repository, tmp_path):
    (tmp_path / "apt").mkdir()
    (tmp_path / "apt/old.deb").write_text("")
    target = apt_repository.build(tmp_path / "apt")
    assert not (target / "old.deb").exists()
    assert list(tmp_path.iterdir()) == [target]


def test_listing_matches_the_files(repository):
    stanzas = (repository / "Packages").read_text().strip().split("\n\n")
    assert len(stanzas) == len(apt_repository.PACKAGES)
    for stanza in stanzas:
        fields = dict(line.split(": ", 1) for line in stanza.splitlines())
        data = (repository / fields["Filename"]).read_bytes()
        assert (int(fields["Size"]), fields["SHA256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert "SIMULATED" in fields["Description"]
    release = (repository / "Release").read_text()
    for name in ("Packages", "Packages.gz"):
        assert hashlib.sha256((repository / name).read_bytes()).hexdigest() in release
    assert gzip.decompress((repository / "Packages.gz").read_bytes()) == (repository / "Packages").read_bytes()


def test_packages_hold_no_files(repository):
    for deb in repository.glob("*.deb"):
        listing = subprocess.run(["dpkg-deb", "--contents", deb], capture_output=True, text=True, check=True).stdout
        assert [line.split()[-1] for line in listing.splitlines()] == ["./"]


def test_the_traps_are_there():
    names = {package.name for package in apt_repository.PACKAGES}
    assert {"nvidia-driver-590-open", "cuda-drivers", "cuda-13-0", "linux-image-7.0.0-1019-nvidia"} <= names
