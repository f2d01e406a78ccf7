"""nccl-tests: recorded outputs, what each means, and no text that a parser (that of ib_write_bw too) stumbles over."""

from __future__ import annotations

import contextlib
import random

import pytest
from ansible.module_utils.sparkpair import fabric_bandwidth, nccl, nccl_build
from ansible.module_utils.sparkpair.nccl import NcclError
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

TOOLS = ROOT / "tests/fixtures/tools"


def text(name: str) -> str:
    return (TOOLS / f"{name}.txt").read_text()


HEALTHY = text("all-gather-healthy-reconstructed")


def test_a_healthy_run():
    bench = nccl.parse(HEALTHY)
    assert bench.hosts == ("spark", "spark-3995") and bench.sizes == (17179869184,)
    assert (bench.average, bench.network, bench.version) == (23.74, "IB", "2.28.9")
    assert bench.hcas == ("rocep1s0f1", "roceP2p1s0f1")
    assert nccl.judge(bench) == nccl.Verdict("pass", True, "23.74 GB/s over IB on rocep1s0f1, roceP2p1s0f1", "")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("all-gather-mtu1500-reconstructed", "mtu-1500"),
        ("all-gather-one-rail-synthetic", "one-rail"),
        ("all-gather-stale-firmware-synthetic", "stale-firmware"),
        ("all-gather-sockets-synthetic", "sockets"),
    ],
)
def test_slow_runs_have_a_name_and_a_remedy(name, verdict):
    found = nccl.judge(nccl.parse(text(name)))
    assert (found.name, found.passed) == (verdict, False) and len(found.remedy) > 20


def test_a_fast_run_over_sockets_or_one_adapter_never_passes():
    assert nccl.judge(nccl.parse(HEALTHY.replace("Using network IB", "Using network Socket"))).name == "sockets"
    assert nccl.judge(nccl.parse(HEALTHY.replace("NCCL INFO", "x"))).name == "sockets"
    # One rank alone fell back to one adapter.
    one = HEALTHY.replace(" [1]roceP2p1s0f1:1/RoCE [RO]; OOB enp1s0f1np1:192.168.100.11<0>", "")
    assert nccl.judge(nccl.parse(one)).name == "one-rail"


def test_the_floor_is_exact():
    for average, passed in ((21.9, True), (21.89, False)):
        assert nccl.judge(nccl.parse(HEALTHY.replace(": 23.74", f": {average}"))).passed is passed


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda s: text("all-gather-two-worlds-reconstructed"), "two-worlds"),
        (lambda s: "\n".join(line for line in s.splitlines() if "Rank  1" not in line), "two-worlds"),
        (lambda s: s.replace("spark-3995", "spark"), "same-host"),
        (lambda s: s[: s.index("# Out of bounds")], "no-result"),
        (lambda s: "\n".join(line for line in s.splitlines() if not line.startswith(" 17179869184")), "no-result"),
        (lambda s: s.replace("0 OK", "3 FAILED"), "wrong-values"),
        (lambda s: s.replace("23.72       0", "23.72       7"), "wrong-values"),
        (lambda s: "mpirun: command not found\n", "no-result"),
        (lambda s: text("all-gather-no-driver"), "no-result"),
        (lambda s: "", "no-result"),
        (lambda s: s + "# Avg bus bandwidth    : 99\n", "two-worlds"),
    ],
)
def test_output_that_proves_nothing(change, verdict):
    with pytest.raises(NcclError) as error:
        nccl.parse(change(HEALTHY))
    assert error.value.verdict == verdict and verdict in nccl.REMEDIES


def test_a_run_without_a_result_names_its_first_failure():
    with pytest.raises(NcclError, match=r"Test CUDA failure util.cu:674 'CUDA driver version is insufficient"):
        nccl.parse(text("all-gather-no-driver"))
    with pytest.raises(NcclError, match="ORTE was unable to reliably start one or more daemons"):
        nccl.parse("-----\nORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n-----\n")


def test_the_size_leaves_memory_free():
    """16 GiB froze a node that had less than 40 GiB available."""
    sizes, margin = [16, 8, 4, 2], 8
    for available, size in ((40, 16), (39.9, 8), (24, 8), (16, 4), (12, 2), (11.9, None), (0, None)):
        chosen = nccl.choose_size(int(available * nccl.GIB), sizes, margin)
        assert chosen == (size * nccl.GIB if size else None)


def test_arms_change_one_thing():
    environment = {"NCCL_IB_HCA": "=a,b", "NCCL_DEBUG": "INFO"}
    assert nccl.arm_environment("both", environment, ["a", "b"]) == environment
    assert nccl.arm_environment("one", environment, ["a", "b"])["NCCL_IB_HCA"] == "=a"
    assert nccl.arm_environment("sockets", environment, ["a", "b"])["NCCL_IB_DISABLE"] == "1"


def test_mpirun_uses_no_ssh_and_forwards_no_variable_of_one_node():
    words = nccl.mpirun(["10.0.0.1", "10.0.0.2"], "10.0.0.0/24", ["prog", "-b", "1"])
    assert words[:5] == ["mpirun", "-np", "2", "-H", "10.0.0.1:1,10.0.0.2:1"]
    assert "-x" not in words and "plm_rsh_agent" not in words
    assert words[-3:] == ["prog", "-b", "1"] and "--leave-session-attached" in words


def test_nccl_tests_are_built_for_gb10_with_mpi():
    words = nccl_build.make_command(ROOT, "/usr/local/cuda", "/usr/lib/mpi", 20)
    assert {"MPI=1", "NVCC_GENCODE=-gencode=arch=compute_121,code=sm_121", "NCCL_HOME=/usr"} <= set(words)


def test_a_build_is_whole_or_not_there(tmp_path, monkeypatch):
    commit = "a" * 40
    done: list[list[str]] = []

    def run(command):
        done.append(list(command))
        if "rev-parse" in command:
            return 0, f"{commit}\n", ""
        if command[0] == "make":
            build = next(word for word in command if word.startswith("BUILDDIR=")).removeprefix("BUILDDIR=")
            (tmp_path / build).mkdir()
            (tmp_path / build / "all_gather_perf").write_bytes(b"program")
        return 0, "", ""

    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").touch()
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/git")
    arguments = (tmp_path / "out", "https://source.example", commit, str(tmp_path / "cuda"), "/mpi")
    nccl_build.build(run, *arguments)
    assert nccl_build.is_built(tmp_path / "out", commit) and not nccl_build.is_built(tmp_path / "out", "b" * 40)
    (tmp_path / "out/all_gather_perf").write_bytes(b"damaged")
    assert not nccl_build.is_built(tmp_path / "out", commit)
    with pytest.raises(nccl_build.BuildError, match="make"):
        nccl_build.build(lambda c: (2, "", "no nvcc") if c[0] == "make" else run(c), *arguments)
    with pytest.raises(nccl_build.BuildError, match="40 hexadecimal"):
        nccl_build.build(run, tmp_path, "x", "v2.19", "/cuda", "/mpi")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_ib_write_bw_as_recorded():
    assert fabric_bandwidth.parse_perftest(text("ib-write-bw")) == 92.57
    assert fabric_bandwidth.parse_perftest(text("ib-write-bw-13gbit-reconstructed")) == 13.22
    assert fabric_bandwidth.parse_perftest(text("ib-write-bw-no-row-synthetic")) is None


RECORDED = [path.read_text() for path in sorted(TOOLS.glob("*.txt"))]


@given(st.text(max_size=300) | st.sampled_from(RECORDED), st.randoms(use_true_random=False), st.integers(0, 20))
def test_no_text_makes_the_parsers_raise_anything_else(start: str, dice: random.Random, cuts: int):
    """Any text, and recorded outputs with lines lost, doubled, swapped and bitten."""
    lines = start.splitlines()
    for _ in range(min(cuts, len(lines))):
        at = dice.randrange(len(lines))
        lines[at] = dice.choice(["", lines[at] * 2, lines[dice.randrange(len(lines))], lines[at][: dice.randrange(60)]])
    mangled = "\n".join(lines)
    with contextlib.suppress(NcclError):
        nccl.judge(nccl.parse(mangled))
    fabric_bandwidth.parse_perftest(mangled)
    fabric_bandwidth.parse_iperf(mangled)
