"""Every lock of a Spark resolves on the index that this machine uses, to exactly itself. Needs no lab and no Spark."""

from __future__ import annotations

import re
import sys

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT))

from module_utils.sparkpair.env_lock import parse_lock, parse_requirements

SPARK_LOCKS = sorted((ROOT / "locks").glob("*-aarch64-*.txt"))


@pytest.mark.parametrize("path", SPARK_LOCKS, ids=lambda path: path.name)
def test_a_lock_resolves_to_itself(path, tmp_path):
    lock = parse_lock(path.read_text(encoding="ascii"))
    pins, resolved = tmp_path / "pins.in", tmp_path / "resolved.txt"
    pins.write_text("".join(f"{r.name}=={r.version}\n" for r in lock.requirements))
    run(
        "uv", "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate", "--generate-hashes",
        "--only-binary", ":all:", "--python-version", lock.python, "--output-file", str(resolved),
        "--python-platform", f"{lock.machine}-manylinux_{lock.glibc[0]}_{lock.glibc[1]}", str(pins),
    )  # fmt: skip
    # A requirement that is not locked would be one more line; one that is locked in another version has no solution.
    found = {r.name: r for r in parse_requirements(re.sub(r" ;.*?(?= \\\n)", "", resolved.read_text()))}
    assert {name: r.version for name, r in found.items()} == {r.name: r.version for r in lock.requirements}
    for requirement in lock.requirements:
        assert set(requirement.hashes) <= set(found[requirement.name].hashes), requirement.name
