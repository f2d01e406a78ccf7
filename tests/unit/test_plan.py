"""The address plan: properties that hold for every subnet, and the sentences of its refusals."""

from __future__ import annotations

import ipaddress

import pytest
from ansible.module_utils.sparkpair.plan import MAX_NODES, PlanError, check_mtu, rail_plan
from hypothesis import given
from hypothesis import strategies as st

PRIVATE = ipaddress.ip_network("10.0.0.0/8")


@st.composite
def subnets(draw, longest=23):
    """Any private network from /9 to /`longest`."""
    prefix = draw(st.integers(9, longest))
    index = draw(st.integers(0, 2 ** (prefix - 8) - 1))
    return ipaddress.ip_network((int(PRIVATE.network_address) + index * 2 ** (32 - prefix), prefix))


@given(subnets(), st.integers(1, 2), st.integers(1, MAX_NODES))
def test_every_address_is_inside_unique_and_a_host(network, rails, nodes):
    plans = rail_plan(str(network), rails, nodes)
    addresses = [ipaddress.ip_address(plan.address(rank)) for plan in plans for rank in range(nodes)]
    assert len(plans) == rails
    assert len(set(addresses)) == rails * nodes
    assert all(address in network for address in addresses)
    for plan in plans:
        assert not {plan.network.network_address, plan.network.broadcast_address} & set(addresses)


@given(subnets(), st.integers(1, 20))
def test_rails_never_share_an_address(network, rails):
    try:
        plans = rail_plan(str(network), rails, 2)
    except PlanError as error:
        assert "too small" in str(error)
        assert rails > 2 ** (24 - network.prefixlen)
        return
    for i, plan in enumerate(plans):
        assert not any(plan.network.overlaps(other.network) for other in plans[i + 1 :])


@given(subnets(longest=22), st.integers(0, MAX_NODES - 1))
def test_adding_a_node_or_rail_moves_nobody(network, rank):
    few, more = rail_plan(str(network), 2, rank + 1), rail_plan(str(network), 4, MAX_NODES)
    assert [plan.address(rank) for plan in few] == [plan.address(rank) for plan in more[:2]]


@given(subnets(), st.integers(1, 2**24 - 2))
def test_a_taken_address_is_refused_exactly_when_it_is_inside(network, offset):
    taken = ipaddress.ip_address(int(PRIVATE.network_address) + offset)
    if taken in network:
        with pytest.raises(PlanError, match=r"overlaps .* \(spark-a management\)"):
            rail_plan(str(network), 2, 2, {"spark-a management": str(taken)})
    else:
        rail_plan(str(network), 2, 2, {"spark-a management": str(taken)})


@given(subnets(), st.integers(1, 2**8 - 1))
def test_host_bits_are_refused_with_the_network_to_write(network, host):
    with pytest.raises(PlanError, match=f"write {network}"):
        rail_plan(f"{network[host]}/{network.prefixlen}", 2, 2)


@given(st.text(max_size=20))
def test_garbage_is_a_plan_error_and_nothing_else(text):
    try:
        rail_plan(text, 2, 2)
    except PlanError as error:
        assert "fabric_subnet" in str(error)


def test_the_default_plan():
    first, second = rail_plan("192.168.176.0/23", 2, 2)
    assert (first.interface(0), second.interface(0)) == ("192.168.176.1/24", "192.168.177.1/24")
    assert (first.address(1), second.address(1)) == ("192.168.176.2", "192.168.177.2")


@pytest.mark.parametrize(
    ("subnet", "sentence"),
    [
        ("192.168.176.0", "is not a network"),
        ("garbage/24", "is not a network"),
        ("fd00::/64", "is not a network"),
        ("", "is not a network"),
        (None, "is not a network"),
        ("192.168.176.1/23", "write 192.168.176.0/23"),
        ("192.168.176.0/24", "write a /23"),
        ("192.168.176.0/30", "too small"),
        ("224.0.0.0/16", "multicast"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("0.0.0.0/0", "no host can use"),
    ],
)
def test_refused_subnets(subnet, sentence):
    with pytest.raises(PlanError, match=sentence):
        rail_plan(subnet, 2, 2)


@pytest.mark.parametrize("taken", ["192.168.176.7/24", "192.168.177.9", "192.168.0.0/16", "0.0.0.0/0"])
def test_overlap_counts_for_the_whole_subnet(taken):
    with pytest.raises(PlanError, match="overlaps"):
        rail_plan("192.168.176.0/23", 2, 2, {"enP7s7": taken})


@pytest.mark.parametrize("taken", ["10.77.0.1/24", "spark-a.local", "fe80::1/64", "192.168.178.1"])
def test_what_does_not_overlap(taken):
    assert len(rail_plan("192.168.176.0/23", 2, 2, {"enP7s7": taken})) == 2


def test_too_many_nodes_and_ranks():
    with pytest.raises(PlanError, match="do not fit"):
        rail_plan("10.0.0.0/8", 2, MAX_NODES + 1)
    with pytest.raises(PlanError, match="rank 254"):
        rail_plan("10.0.0.0/8", 2, 2)[0].address(254)
    with pytest.raises(PlanError, match="at least one"):
        rail_plan("10.0.0.0/8", 0, 2)


@pytest.mark.parametrize("mtu", [900, 1279, 9217, 0, -1, "9000", None, True])
def test_refused_mtu(mtu):
    with pytest.raises(PlanError, match="fabric_mtu"):
        check_mtu(mtu)


@pytest.mark.parametrize("mtu", [1280, 1500, 9000, 9216])
def test_accepted_mtu(mtu):
    assert check_mtu(mtu) == mtu
