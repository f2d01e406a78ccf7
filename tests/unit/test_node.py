"""What nodes must be, and must share."""

from __future__ import annotations

import pytest
from ansible.module_utils.sparkpair.node import (
    GIB,
    check_node,
    explain_failure,
    free_bytes,
    parse_keys,
    parse_meminfo,
    read_node,
)

LIMITS = {"memory_gib": 100, "disk_gib": {"/opt": 25}, "service_user": "sparkpair", "service_uid": 870}
NODE = {
    "os": "ubuntu 24.04",
    "release": "7.5.0",
    "arch": "aarch64",
    "kernel": "6.17",
    "python": "3.12.3",
    "systemd": True,
    "memory_total": 121 * GIB,
    "memory_available": 100 * GIB,
    "disk_free": {"/opt": 900 * GIB},
    "epoch": 1000.0,
    "users": {"sparkpair": 870},
    "uids": {"0": "root", "870": "sparkpair"},
    "uid": 1000,
}


def test_a_spark_passes():
    assert check_node("spark-a", NODE, LIMITS, 1002.0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "3.10.12"}, "Python 3.10.12"),
        ({"systemd": False}, "no systemd"),
        ({"memory_total": 16 * GIB}, "16.0 GiB of memory"),
        ({"disk_free": {"/opt": 3 * GIB}}, "3.0 GiB free for /opt"),
        ({"epoch": 4600.0}, "+3600 s"),
        ({"epoch": 900.0}, "-100 s"),
        ({"users": {"sparkpair": 998}}, "usermod -u 870 sparkpair"),
        ({"uids": {"870": "squatter"}}, "uid 870 with user squatter"),
    ],
)
def test_what_a_node_must_not_be(change, words):
    (fault,) = check_node("spark-b", {**NODE, **change}, LIMITS, 1000.0)
    assert fault.startswith("spark-b: found ") and "expected" in fault and words in fault


def test_a_missing_service_user_is_fine_before_the_first_run():
    assert check_node("spark-a", {**NODE, "users": {"sparkpair": None}}, LIMITS, 1000.0) == []


def test_the_last_ota_line_wins():
    text = 'DGX_SWBUILD_VERSION="7.2.3"\nDGX_OTA_VERSION="7.3.1"\n# note\nDGX_OTA_VERSION="7.5.0"\n'
    assert parse_keys(text)["DGX_OTA_VERSION"] == "7.5.0"


def test_meminfo_is_bytes_and_tolerates_odd_lines():
    text = "MemTotal:       127598544 kB\nHugePages_Total:       0\nbroken\nCmaTotal:\n"
    assert parse_meminfo(text) == {"MemTotal": 127598544 * 1024, "HugePages_Total": 0}


def test_free_space_of_a_path_that_does_not_exist_is_its_parents(tmp_path):
    assert free_bytes(str(tmp_path / "a" / "b")) > 0


def test_what_is_in_place_needs_no_room(tmp_path):
    (tmp_path / "a" / "models" / "current").mkdir(parents=True)
    assert read_node([str(tmp_path / "a"), str(tmp_path / "b")], [])["disk_free"].keys() == {str(tmp_path / "b")}


def test_this_machine_can_be_read():
    node = read_node(["/"], ["root", "no-such-user"])
    assert node["memory_total"] > 0 and node["users"] == {"root": 0, "no-such-user": None}
    assert node["groups"] == {"root": 0, "no-such-user": None}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            {"unreachable": True, "msg": "Data could not be sent. Make sure it can be reached over ssh: timed out"},
            "no SSH connection (timed out), expected one: ssh spark@192.0.2.12",
        ),
        ({"failed": True, "msg": "Incorrect sudo password"}, "--ask-become-pass"),
        ({"failed": True, "msg": "python3: not found"}, "ansible_python_interpreter"),
    ],
)
def test_a_node_that_was_not_read_says_why(result, words):
    (fault,) = explain_failure("spark-b", result, "spark@192.0.2.12")
    assert words in fault and fault.startswith("spark-b: ")


def test_a_node_that_was_read_explains_nothing():
    assert explain_failure("spark-a", {"node": NODE}, "") == []
