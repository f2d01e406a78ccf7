"""The proof of the rails: what ping prints, and what each kind of failure says."""

from __future__ import annotations

import pytest
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_ping import mean_rtt, parity_warning, paths, prove_all, received

RAILS = [
    {"rail": 0, "netdev": "enp1s0f0np0", "addresses_by_rank": ["192.168.176.1", "192.168.176.2", "192.168.176.3"]},
    {"rail": 1, "netdev": "enP2p1s0f0np0", "addresses_by_rank": ["192.168.177.1", "192.168.177.2", "192.168.177.3"]},
]
GOOD = """PING 192.168.176.2 (192.168.176.2) from 192.168.176.1 enp1s0f0np0: 8972(9000) bytes of data.

--- 192.168.176.2 ping statistics ---
3 packets transmitted, 3 received, 0% packet loss, time 20ms
rtt min/avg/max/mdev = 0.041/0.052/0.070/0.012 ms
"""
LOST = """
--- 192.168.176.2 ping statistics ---
3 packets transmitted, 0 received, 100% packet loss, time 2031ms
"""
UNREACHABLE = "3 packets transmitted, 0 received, +3 errors, 100% packet loss, time 2031ms\npipe 3\n"
TOO_LONG = "ping: local error: message too long, mtu=1500\n"


def answers(**by_netdev):
    """A run function: netdev -> (answer to a full packet, answer to a small one)."""

    def run(command):
        full, small = by_netdev[command[command.index("-I") + 1]]
        text = full if command[command.index("-s") + 1] == "8972" else small
        return (0, text, "") if text is GOOD else (1, text, TOO_LONG if text is LOST and full is None else "")

    return run


def test_every_peer_over_every_rail_with_its_own_addresses():
    found = paths(RAILS, rank=1, names=["a", "b", "c"], mtu=9000)
    assert [(path.peer, path.source, path.target) for path in found] == [
        ("a", "192.168.176.2", "192.168.176.1"),
        ("a", "192.168.177.2", "192.168.177.1"),
        ("c", "192.168.176.2", "192.168.176.3"),
        ("c", "192.168.177.2", "192.168.177.3"),
    ]
    command = found[1].command(found[1].payload)
    assert command[command.index("-M") + 1] == "do"
    assert command[command.index("-s") + 1] == "8972"
    assert command[-3:] == ["-I", "enP2p1s0f0np0", "192.168.177.1"]


def test_ping_output():
    assert (received(GOOD), received(LOST), received(UNREACHABLE), received("")) == (3, 0, 0, 0)
    assert (mean_rtt(GOOD), mean_rtt(LOST)) == (0.052, None)


def test_proven_paths_carry_their_time():
    todo = paths(RAILS, 0, ["a", "b"], 9000)
    proven = prove_all(todo, answers(enp1s0f0np0=(GOOD, GOOD), enP2p1s0f0np0=(GOOD, GOOD)), 0)
    assert [path.rtt_ms for path in proven] == [0.052, 0.052]


def test_a_smaller_mtu_at_the_other_end_is_told_from_a_dead_rail():  # S9
    todo = paths(RAILS, 0, ["a", "b"], 9000)
    with pytest.raises(FabricError, match="small packets pass, 9000 bytes do not") as refusal:
        prove_all(todo, answers(enp1s0f0np0=(LOST, GOOD), enP2p1s0f0np0=(GOOD, GOOD)), 0)
    assert "rail 0, enp1s0f0np0 192.168.176.1 -> b 192.168.176.2" in str(refusal.value)
    assert "rail 1" not in str(refusal.value)


def test_a_smaller_mtu_at_this_end_names_it():
    def run(command):
        return 1, LOST, TOO_LONG

    with pytest.raises(FabricError, match="enp1s0f0np0 has MTU 1500 instead of 9000"):
        prove_all(paths(RAILS[:1], 0, ["a", "b"], 9000), run, 0)


def test_every_dead_rail_is_named():
    dead = answers(enp1s0f0np0=(LOST, LOST), enP2p1s0f0np0=(UNREACHABLE, UNREACHABLE))
    with pytest.raises(FabricError, match=r"rail 0.*no answer.*rail 1.*no answer"):
        prove_all(paths(RAILS, 0, ["a", "b"], 9000), dead, 0)


def test_lost_packets_are_not_a_proof():
    flaky = GOOD.replace("3 received", "2 received")
    with pytest.raises(FabricError, match="small packets pass"):
        prove_all(paths(RAILS[:1], 0, ["a", "b"], 9000), lambda command: (0, flaky, ""), 0)


def test_a_peer_that_answers_late_passes():
    replies = iter([LOST, UNREACHABLE, GOOD])
    proven = prove_all(paths(RAILS[:1], 0, ["a", "b"], 9000), lambda command: (0, next(replies), ""), 30)
    assert len(proven) == 1


def test_different_cages_warn():  # S4
    assert parity_warning(["a", "b"], ["p0", "p0"]) is None
    assert parity_warning(["a", "b"], []) is None
    assert parity_warning(["a", "b"], ["", "p1"]) is None
    assert "different cages (a p0, b p1)" in str(parity_warning(["a", "b"], ["p0", "p1"]))
