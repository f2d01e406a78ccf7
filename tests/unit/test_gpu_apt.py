"""Packages by apt: what is missing, and every plan that must be refused; on real apt where this machine has it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
import yaml
from ansible.module_utils.sparkpair.apt import (
    AptError,
    Installed,
    missing,
    parse_installed,
    parse_simulation,
    patiently,
    refusals,
    simulate,
)
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lab import apt_repository

DEFAULTS = yaml.safe_load((ROOT / "roles/gpu/defaults/main.yml").read_text())
NEVER, PINNED = DEFAULTS["gpu_never"], DEFAULTS["gpu_packages"]
SIMULATION = """\
NOTE: This is only a simulation!
Inst libnccl2 [2.28.7-1+cuda13.0] (2.28.9-1+cuda13.0 NVIDIA CUDA:repo [arm64])
Inst nvidia-driver-580-open [580.142-0ubuntu1] (580.178.04-0ubuntu1 Ubuntu:24.04/noble [arm64]) []
Remv cuda-compat-13-0 [13.0.1-1]
Conf libnccl2 (2.28.9-1+cuda13.0 NVIDIA CUDA:repo [arm64])
"""


def test_a_simulation_is_read_and_what_must_not_be_is_refused():
    actions = parse_simulation(SIMULATION)
    assert [(action.kind, action.name) for action in actions] == [
        ("Inst", "libnccl2"),
        ("Inst", "nvidia-driver-580-open"),
        ("Remv", "cuda-compat-13-0"),
    ]
    assert refusals(actions, NEVER) == [
        "upgrade nvidia-driver-580-open 580.142-0ubuntu1 to 580.178.04-0ubuntu1",
        "remove cuda-compat-13-0 13.0.1-1",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia-driver-580-open",
        "nvidia-open",
        "cuda-drivers-590",
        "libnvidia-compute-580",
        "nvidia-dkms-580-open",
        "linux-image-6.17.0-1026-nvidia",
        "linux-modules-nvidia-580-open-nvidia-hwe-24.04",
        "linux-nvidia-hwe-24.04",
        "nvidia-firmware-580",
    ],
)
def test_drivers_and_kernels_are_never_touched(name):
    assert refusals(parse_simulation(f"Inst {name} (1.0 x [arm64])\n"), NEVER) == [f"install {name} 1.0"]


@pytest.mark.parametrize("name", ["libnccl2", "cuda-toolkit-13-0", "openmpi-bin", "linux-libc-dev", "libnuma1"])
def test_what_the_role_needs_is_not_barred(name):
    assert refusals(parse_simulation(f"Inst {name} (1.0 x [arm64])\n"), NEVER) == []


def test_only_what_is_missing_or_wrong_is_installed_and_what_is_free_is_held():
    installed = {
        "libnccl2": Installed("2.28.9-1+cuda13.0", held=True),
        "libnccl-dev": Installed("2.27.3-1", held=True),
        "cuda-toolkit-13-0": Installed("13.0.2-1", held=False),
        "g++": Installed("13", held=False),
    }
    assert missing(PINNED, ["g++", "make"], installed) == (
        ["libnccl-dev=2.28.9-*", "make"],
        ["cuda-toolkit-13-0", "libnccl-dev"],
    )


def test_installed_packages_are_read_with_their_holds():
    text = "libnccl2 2.28.9-1+cuda13.0 hi \ngone 1 rc \nmake 4.3 ii \n"
    assert parse_installed(text) == {"libnccl2": Installed("2.28.9-1+cuda13.0", True), "make": Installed("4.3", False)}


def test_another_apt_is_waited_for_and_then_named():
    answers = [(100, "", "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1"), (0, "done", "")]
    slept = []
    assert patiently(lambda _: answers.pop(0), ["apt-get"], 60, slept.append) == "done"
    assert slept == [3]
    with pytest.raises(AptError, match="another apt at work for 0 s"):
        patiently(lambda _: (100, "", "E: Unable to acquire the dpkg frontend lock"), ["apt-get"], 0)
    with pytest.raises(AptError, match="404"):
        patiently(lambda _: (100, "", "E: Failed to fetch 404"), ["apt-get"], 60)


@given(st.text(max_size=80), st.sampled_from(["Inst ", "Remv ", "Purg ", ""]))
def test_no_text_makes_the_parsers_raise_anything_else(text, start):
    parse_installed(text)
    with contextlib.suppress(AptError):
        parse_simulation(start + text)


@pytest.fixture(scope="module")
def apt(tmp_path_factory):
    """Real apt on a root of its own, with the lab's repository as its only source and a driver installed."""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb", "gpg"))):
        pytest.skip("apt-get, dpkg-deb and gpg are tools of Debian")
    root = tmp_path_factory.mktemp("root")
    apt_repository.build(root / "repository")
    for folder in (
        "etc/apt/preferences.d",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/partial",
        "var/lib/dpkg",
    ):
        (root / folder).mkdir(parents=True)
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{root}/repository ./\n")
    (root / "var/lib/dpkg/status").write_text(
        "Package: nvidia-driver-580-open\nStatus: install ok installed\nVersion: 580.142-0ubuntu1\n"
        "Architecture: all\nMaintainer: x <x@x.invalid>\nDescription: driver of DGX OS\n"
    )
    (root / "apt.conf").write_text(f'Dir "{root}"; Dir::State::status "{root}/var/lib/dpkg/status";\n')
    environment = {"APT_CONFIG": str(root / "apt.conf"), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout, done.stderr

    status, _, err = run(["apt-get", "-o", "APT::Sandbox::User=root", "update"])
    assert status == 0, err
    return root, run


def pin(root, text):
    (root / "etc/apt/preferences.d/sparkpair").write_text(text)


PINS = f"Package: {' '.join(NEVER)}\nPin: release l=simulated\nPin-Priority: -1\n"


def test_the_pinned_packages_install(apt):
    root, run = apt
    pin(root, PINS)
    done = [str(action) for action in simulate(run, [f"{name}={version}" for name, version in PINNED.items()], NEVER)]
    assert "install libnccl2 2.28.9-1+cuda13.0" in done and len(done) == 3


@pytest.mark.parametrize("pins", ["", PINS], ids=["without the pins", "with the pins"])
@pytest.mark.parametrize(
    "package",
    [
        "nvidia-driver-580-open=580.178*",
        "nvidia-driver-590-open",
        "cuda-drivers",
        "cuda-13-0",
        "linux-image-7.0.0-1019-nvidia",
        "cuda-compat-tools",
    ],
)
def test_no_driver_or_kernel_is_changed_by_any_way(apt, package, pins):
    """By name, as an upgrade, as a dependency of CUDA, and by removing the driver that is there."""
    root, run = apt
    pin(root, pins)
    with pytest.raises(AptError, match=r"expected (no change|one)"):
        simulate(run, [package], NEVER)


def test_an_upgrade_of_everything_leaves_the_driver_alone(apt):
    root, run = apt
    pin(root, PINS)
    assert "nvidia-driver" not in run(["apt-get", "--simulate", "dist-upgrade"])[1]
    pin(root, "")
    # The trap is real: without the pins it would be taken.
    assert "Inst nvidia-driver-580-open [580.142-0ubuntu1] (580.178.04" in run(["apt-get", "-s", "dist-upgrade"])[1]
