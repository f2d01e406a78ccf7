"""A flat apt repository of empty packages that stand in for NVIDIA's.

They carry the names and versions that a DGX Spark installs and nothing else; each says in its description that it is
simulated. Every byte is a function of this file, so two builds are equal, but for the signature: each build makes a key
of its own, signs, and forgets the private half.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.settings import LabError

EPOCH = 1767225600
"""Time stamp of everything, 2026-01-01 UTC in seconds."""
DATE = "Thu, 01 Jan 2026 00:00:00 UTC"


@dataclass(frozen=True)
class Package:
    """One empty package."""

    name: str
    version: str
    purpose: str
    depends: str = ""
    conflicts: str = ""

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version}_all.deb"

    def control(self) -> str:
        """The text of DEBIAN/control."""
        fields = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": "all",
            "Maintainer": "The sparkpair lab <lab@sparkpair.invalid>",
            "Section": "misc",
            "Priority": "optional",
            "Depends": self.depends,
            "Conflicts": self.conflicts,
            "Description": f"SIMULATED {self.purpose}: an empty stand-in for the lab",
        }
        return "".join(f"{key}: {value}\n" for key, value in fields.items() if value)


PACKAGES = (
    Package("cuda-toolkit-13-0", "13.0.2-1", "CUDA toolkit"),
    Package("libnccl2", "2.28.9-1+cuda13.0", "NCCL library"),
    Package("libnccl-dev", "2.28.9-1+cuda13.0", "NCCL headers", "libnccl2 (= 2.28.9-1+cuda13.0)"),
    # What DGX OS ships, for nodes that want to look like one.
    Package("nvidia-driver-580-open", "580.142-0ubuntu1", "GPU driver"),
    # Traps. Newer than what is pinned, one of them known to hang:
    Package("libnccl2", "2.30.4-1+cuda13.2", "NCCL library"),
    Package("libnccl-dev", "2.30.4-1+cuda13.2", "NCCL headers", "libnccl2 (= 2.30.4-1+cuda13.2)"),
    # drivers and kernels, by name, as an upgrade, and through dependencies;
    Package("nvidia-driver-580-open", "580.178.04-0ubuntu1", "GPU driver"),
    Package("nvidia-driver-590-open", "590.48.01-1", "GPU driver"),
    Package("cuda-drivers", "590.48.01-1", "driver of the CUDA repository", "nvidia-driver-590-open"),
    Package("cuda-13-0", "13.0.2-1", "CUDA with its driver", "cuda-toolkit-13-0, cuda-drivers"),
    Package("linux-image-7.0.0-1019-nvidia", "7.0.0-1019.19", "kernel"),
    # and something that only fits where the driver is gone.
    Package("cuda-compat-tools", "13.0.2-1", "tools that remove the driver", conflicts="nvidia-driver-580-open"),
)
"""Versions of DGX OS 7.5 (CUDA 13.0.2, NCCL 2.28.9, driver 580.142), and traps that nothing may ever install."""

OWNER = "SIMULATED repository of the sparkpair lab"
"""User id of the key that signs."""


def build(target: Path) -> Path:
    """Write the repository to `target`, replacing what is there, and return `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".apt-") as scratch:
        repository = Path(scratch) / "repository"
        repository.mkdir()
        stanzas = [_build_package(package, Path(scratch), repository) for package in PACKAGES]
        listing = "\n".join(stanzas).encode()
        (repository / "Packages").write_bytes(listing)
        (repository / "Packages.gz").write_bytes(gzip.compress(listing, mtime=0))
        (repository / "Release").write_text(_release(repository))
        _sign(repository)
        shutil.rmtree(target, ignore_errors=True)
        repository.rename(target)
    return target


def _build_package(package: Package, scratch: Path, repository: Path) -> str:
    """Build one package into `repository`; returns its stanza of the Packages file."""
    tree = scratch / package.file_name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(package.control())
    (tree / "DEBIAN").chmod(0o755)
    (tree / "DEBIAN/control").chmod(0o644)
    tree.chmod(0o755)
    deb = repository / package.file_name
    done = subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", "-Znone", str(tree), str(deb)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError(f"dpkg-deb could not build {package.file_name}: {done.stderr.strip()}")
    data = deb.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return f"{package.control()}Filename: ./{package.file_name}\nSize: {len(data)}\nSHA256: {digest}\n"


def _release(repository: Path) -> str:
    """The text of the Release file, with the hashes of the two listings."""
    lines = [f"{key}: simulated" for key in ("Origin", "Label", "Suite", "Codename")]
    lines += ["Architectures: all amd64 arm64", f"Date: {DATE}", "SHA256:"]
    for name in ("Packages", "Packages.gz"):
        data = (repository / name).read_bytes()
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
    return "\n".join(lines) + "\n"


def _sign(repository: Path) -> None:
    """Write InRelease, key.asc and key.fingerprint, with a new key whose private half is gone when this returns."""
    # gpg's agent listens on a socket in this folder, and paths of sockets are short.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="lab-gpg-") as home:
        stamp = f"--faked-system-time={EPOCH}!"
        base = ["gpg", "--homedir", home, "--batch", "--yes", "--no-tty", "--quiet", stamp]
        try:
            _gpg(
                [
                    *base,
                    "--passphrase",
                    "",
                    "--pinentry-mode",
                    "loopback",
                    "--quick-gen-key",
                    OWNER,
                    "ed25519",
                    "sign",
                    "0",
                ]
            )
            listing = _gpg([*base, "--with-colons", "--list-keys", OWNER])
            prints = [line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:")]
            (repository / "key.fingerprint").write_text(prints[0] + "\n")
            (repository / "key.asc").write_text(_gpg([*base, "--armor", "--export", OWNER]))
            _gpg([*base, "--clearsign", "--output", str(repository / "InRelease"), str(repository / "Release")])
        finally:
            subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], capture_output=True, check=False)


def _gpg(command: list[str]) -> str:
    """Output of a gpg command; raises LabError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise LabError(f"gpg could not sign the simulated repository: {done.stderr.strip()[-500:]}")
    return done.stdout
