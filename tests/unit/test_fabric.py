"""Reading the fabric from kernel-shaped trees: every scenario about selection, and what each refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible.module_utils.sparkpair import fabric_probe
from ansible.module_utils.sparkpair.fabric import (
    FabricError,
    default_route_interfaces,
    group_cages,
    peer_addresses,
    read_fabric,
    read_ports,
)
from ansible.module_utils.sparkpair.fabric_reader import read_renderer
from ansible.module_utils.sparkpair.plan import PlanError

from lab.simulated_rdma import spark_ports, write, write_hca, write_netdev

NAMES = ("spark-a", "spark-b")
SUBNET = "192.168.176.0/23"
MANAGEMENT = {
    "ifname": "enP7s7",
    "flags": ["UP", "LOWER_UP"],
    "addr_info": [{"family": "inet", "local": "10.77.0.1", "prefixlen": 24}],
}


@pytest.fixture
def node(tmp_path):
    """Build a node from ports and read it: `node(ports, links=..., routes=..., **read_fabric arguments)`."""

    roots = (tmp_path / str(number) for number in range(10))

    def read(ports, links=(), routes=(), *, hcas=True, **arguments):
        root = next(roots)
        for port in ports:
            write_netdev(root, port, live=False)
            if hcas:
                write_hca(root, port)
        known = [
            {
                "ifname": port.netdev,
                "flags": [] if port.carrier is None else ["UP"],
                "addr_info": [{"family": "inet", "local": address, "prefixlen": 24} for address in port.addresses],
            }
            for port in ports
        ]
        defaults = {"subnet": SUBNET, "rank": 0, "names": NAMES}
        return read_fabric(root, [MANAGEMENT, *known, *links], routes, **(defaults | arguments))

    return read


def change(ports, **changes):
    """Replace fields of single ports: `change(ports, enp1s0f0np0={"carrier": "0"})`."""
    return [replace(port, **changes.get(port.netdev, {})) for port in ports]


def test_one_cable_in_p1(node):  # S1
    fabric = node(spark_ports(0, cabled="p1"))
    assert fabric.cage == "p1"
    assert [rail.hca for rail in fabric.rails] == ["rocep1s0f1", "roceP2p1s0f1"]
    assert [rail.netdev for rail in fabric.rails] == ["enp1s0f1np1", "enP2p1s0f1np1"]
    assert fabric.problems == ()


def test_planned_addresses_of_every_rank(node):
    fabric = node(spark_ports(1), rank=1, names=("a", "b", "c"))
    first, second = fabric.rails
    assert (first.address, second.address) == ("192.168.176.2/24", "192.168.177.2/24")
    assert first.addresses_by_rank == ("192.168.176.1", "192.168.176.2", "192.168.176.3")
    assert (first.rail, first.speed, first.mtu, first.carrier) == (0, 200_000, 1500, True)
    assert fabric.as_dict()["rails"][1]["addresses_by_rank"][2] == "192.168.177.3"


def test_everything_that_sysfs_says_of_a_port(node):
    fabric = node(spark_ports(0))
    port, dark = fabric.cages["p0"][1], fabric.cages["p1"][1]
    assert (port.link_width, port.link_speed, port.port_state, port.link_layer) == (
        4, "32.0 GT/s PCIe", "ACTIVE", "Ethernet",
    )  # fmt: skip
    assert port.switch_id == fabric.cages["p0"][0].switch_id == "4cbb47000001"
    assert (dark.port_state, dark.hca) == ("DOWN", "roceP2p1s0f1")
    assert [(gid.index, gid.type, gid.netdev) for gid in port.gids] == [
        (slot, "RoCE v2" if slot % 2 else "IB/RoCE v1", "enP2p1s0f0np0") for slot in range(4)
    ]
    assert port.gids[3].gid == "0000:0000:0000:0000:0000:ffff:c0a8:b101"
    assert fabric.as_dict()["cages"]["p0"][1]["gids"][3]["index"] == 3


@pytest.mark.parametrize("empty_folder", [True, False])
def test_hot_removed_is_no_cable_and_not_a_driver_failure(tmp_path, empty_folder):  # S2
    if empty_folder:
        (tmp_path / "class/infiniband").mkdir(parents=True)
    with pytest.raises(FabricError, match="leaves the PCI bus while no cable is in") as refusal:
        read_fabric(tmp_path, [MANAGEMENT], [], subnet=SUBNET, rank=0, names=NAMES)
    assert "driver" not in str(refusal.value)


def test_rdma_devices_without_interfaces_are_a_driver_failure(tmp_path):
    write_hca(tmp_path, spark_ports(0)[0])
    with pytest.raises(FabricError, match="rocep1s0f0 have no network interface"):
        read_fabric(tmp_path, [], [], subnet=SUBNET, rank=0, names=NAMES)


def test_an_unaddressed_twin_can_still_be_chosen(node):  # S3, before the role gives it an address
    fabric = node(change(spark_ports(0), enP2p1s0f0np0={"addresses": ()}))
    assert fabric.rails[1].addresses == ()
    assert fabric.rails[1].address == "192.168.177.1/24"


def test_different_cages_on_the_two_nodes_give_each_its_own_names(tmp_path):  # S4
    found = []
    for rank, cage in enumerate(("p0", "p1")):
        root = tmp_path / str(rank)
        for port in spark_ports(rank, cabled=cage):
            write_netdev(root, port, live=False)
            write_hca(root, port)
        found.append(read_fabric(root, [], [], subnet=SUBNET, rank=rank, names=NAMES))
    assert [fabric.cage for fabric in found] == ["p0", "p1"]
    assert [rail.hca for fabric in found for rail in fabric.rails] == [
        "rocep1s0f0",
        "roceP2p1s0f0",
        "rocep1s0f1",
        "roceP2p1s0f1",
    ]


def test_a_slow_pcie_link_is_told(node, tmp_path):
    node(spark_ports(0))
    write(tmp_path / "0/devices/0002:01:00.0/current_link_speed", "16.0 GT/s PCIe")
    fabric = read_fabric(tmp_path / "0", [MANAGEMENT], [], subnet=SUBNET, rank=0, names=NAMES)
    assert fabric.problems[0].startswith("enP2p1s0f0np0 has a PCIe link of 16.0 GT/s PCIe instead of 32.0 GT/s")


def test_mtu_is_read_per_rail(node):  # S9: that the ends agree is for the ping to show
    fabric = node(change(spark_ports(0), enp1s0f0np0={"mtu": 9000}))
    assert [rail.mtu for rail in fabric.rails] == [9000, 1500]


def test_cable_but_no_link(node):
    with pytest.raises(FabricError, match=r"cage p0 .* has no link: seat the QSFP cable.*cage p1 .* has no link"):
        node(spark_ports(0, cabled="none"))


def test_link_on_one_twin_only(node):
    with pytest.raises(FabricError, match="link on one twin only") as refusal:
        node(change(spark_ports(0), enP2p1s0f0np0={"carrier": "0"}))
    assert "p0 (enp1s0f0np0 link, enP2p1s0f0np0 no link)" in str(refusal.value)
    assert "cage p1" not in str(refusal.value)


def test_a_port_of_another_adapter_is_no_twin(node):
    with pytest.raises(FabricError, match=r"cage p0 .* joins two adapters"):
        node(change(spark_ports(0), enP2p1s0f0np0={"switch_id": "4cbb47999999"}))


def test_a_twin_that_is_missing(node):
    with pytest.raises(FabricError, match="only one of its two twins"):
        node([port for port in spark_ports(0) if port.netdev != "enP2p1s0f0np0"])


def two_cables(addressed=False):
    up = {"carrier": "1", "speed": "200000"}
    bare = {} if addressed else {"addresses": ()}
    return change(spark_ports(0), enp1s0f0np0=bare, enP2p1s0f0np0=bare, enp1s0f1np1=up, enP2p1s0f1np1=up)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, r"p0 \(enp1s0f0np0 .* and p1 \(enp1s0f1np1 .* set fabric_cage to p0 or p1 for this node$"),
        ({}, r"p0 .* and p1 .* no other node answers on either"),
        (
            {"enp1s0f0np0": {"spark-b"}, "enP2p1s0f1np1": {"spark-b"}},
            r"p0 .* where spark-b answers and p1 .* where spark-b",
        ),
    ],
)
def test_both_cages_cabled_names_both(node, seen, words):
    with pytest.raises(FabricError, match=words):
        node(two_cables(), probe=None if seen is None else lambda ports: seen)
    assert node(two_cables(), cage="p1").rails[0].netdev == "enp1s0f1np1"


@pytest.mark.parametrize("netdev", ["enp1s0f1np1", "enP2p1s0f1np1"])
def test_of_two_cables_the_one_where_the_peer_answers_is_chosen(node, netdev):
    asked = []

    def probe(ports):
        asked.extend(port.netdev for port in ports)
        return {netdev: {"spark-b"}}

    assert node(two_cables(), probe=probe).cage == "p1"
    assert asked == ["enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"]


def test_of_two_cables_the_one_that_is_configured_stays(node):
    assert node(two_cables(addressed=True), probe=lambda ports: pytest.fail("nobody has to ask")).cage == "p0"


def test_peers_are_asked_for_by_every_address():
    assert peer_addresses(SUBNET, 1, ["a", "b", "c"], ["10.77.0.1", "", "c.local"]) == {
        "a": ["192.168.176.1", "192.168.177.1", "10.77.0.1"],
        "c": ["192.168.176.3", "192.168.177.3", "c.local"],
    }


@pytest.mark.parametrize(
    ("answer", "renderer"),
    [((0, "NetworkManager\n", ""), "NetworkManager"), ((0, "null\n", ""), ""), ((127, "", "not found"), "")],
)
def test_the_renderer_is_what_netplan_says(answer, renderer):
    assert read_renderer(lambda command: answer) == renderer


def test_an_arp_probe_is_a_request_without_an_address_and_its_reply_is_read():
    frame = fabric_probe.request("4c:bb:47:00:01:01", "10.77.0.2")
    assert len(frame) == 42 and frame[:6] == b"\xff" * 6 and frame[28:32] == bytes(4)
    assert fabric_probe.reply(frame) is None and fabric_probe.reply(b"short") is None
    answer = frame[:20] + b"\x00\x02" + bytes.fromhex("4cbb47000203") + bytes([10, 77, 0, 2]) + frame[32:]
    assert fabric_probe.reply(answer) == ("10.77.0.2", "4c:bb:47:00:02:03")


def test_administratively_down_gives_the_command_that_raises_it(node):
    down = {"carrier": None, "speed": None}
    ports = change(spark_ports(0, cabled="none"), enp1s0f0np0=down, enP2p1s0f0np0=down)
    with pytest.raises(FabricError, match="ip link set dev enp1s0f0np0 up; ip link set dev enP2p1s0f0np0 up"):
        node(ports)


def test_a_second_cage_that_is_down_does_not_hinder(node):
    down = {"carrier": None, "speed": None}
    assert node(change(spark_ports(0), enp1s0f1np1=down, enP2p1s0f1np1=down)).cage == "p0"


@pytest.mark.parametrize(
    ("cage", "sentence"),
    [
        ("p2", "'p2', but this node has p0 and p1"),
        ("p1", "'p1', but cage p1 .* has no link"),
        ("P0", "has p0 and p1"),
    ],
)
def test_an_override_is_validated(node, cage, sentence):
    with pytest.raises(FabricError, match=sentence):
        node(spark_ports(0), cage=cage)


@pytest.mark.parametrize("cage", ["", "p0"])
def test_the_default_route_is_never_taken(node, cage):
    routes = [{"dst": "default", "gateway": "192.168.9.1", "dev": "enP2p1s0f0np0"}]
    with pytest.raises(FabricError, match="carries the default route on enP2p1s0f0np0"):
        node(spark_ports(0), routes=routes, cage=cage)


def test_the_default_route_decides_between_two_cabled_cages(node):
    up = {"carrier": "1", "speed": "200000"}
    ports = change(spark_ports(0), enp1s0f0np0={"addresses": ("172.16.0.2",)}, enp1s0f1np1=up, enP2p1s0f1np1=up)
    assert node(ports, routes=[{"dst": "default", "dev": "enp1s0f0np0"}]).cage == "p1"


def test_default_routes_over_several_paths():
    routes = [
        {"dst": "default", "nexthops": [{"dev": "wlP9s9"}, {"dev": "enP7s7"}]},
        {"dst": "10.0.0.0/8", "dev": "docker0"},
    ]
    assert default_route_interfaces(routes) == ("enP7s7", "wlP9s9")


def test_rdma_driver_missing(node):
    with pytest.raises(FabricError, match=r"enp1s0f0np0 has no RDMA device.*modprobe mlx5_ib"):
        node(spark_ports(0), hcas=False)


def test_subnet_that_the_node_uses_elsewhere_is_refused(node):
    with pytest.raises(PlanError, match=r"overlaps 10\.77\.0\.0/24 \(enP7s7 10\.77\.0\.1/24\)"):
        node(spark_ports(0), subnet="10.77.0.0/23")
    with pytest.raises(PlanError, match="route through docker0"):
        node(spark_ports(0), routes=[{"dst": "192.168.177.0/24", "dev": "docker0"}])


def test_addresses_left_on_the_cage_that_lost_its_cable_do_not_hinder(node):
    ports = change(spark_ports(0, cabled="p1"), enp1s0f0np0={"addresses": ("192.168.176.1",)})
    assert node(ports).cage == "p1"


def test_foreign_addresses_on_rails_are_told(node):
    fabric = node(change(spark_ports(0), enp1s0f0np0={"addresses": ("192.168.176.1", "192.168.100.10")}))
    assert fabric.foreign_addresses == {"enp1s0f0np0": ("192.168.100.10/24",)}


def test_the_plan_is_checked_before_the_hardware(tmp_path):
    with pytest.raises(PlanError, match="is not a network"):
        read_fabric(tmp_path, [], [], subnet="nonsense", rank=0, names=NAMES)
    with pytest.raises(PlanError, match="rank 2 is not one of 2 nodes"):
        read_fabric(tmp_path, [], [], subnet=SUBNET, rank=2, names=NAMES)


def test_port_name_wins_over_the_interface_name(tmp_path):
    for port in spark_ports(0):
        write_netdev(tmp_path, replace(port, netdev=f"renamed{port.pci[3]}{port.pci[-1]}"), live=False)
    cages = group_cages(read_ports(tmp_path, []))
    assert {cage: [port.domain for port in twins] for cage, twins in cages.items()} == {
        "p0": ["0000", "0002"],
        "p1": ["0000", "0002"],
    }


def test_interface_names_serve_where_port_names_are_missing(tmp_path):
    names = [
        "enp1s0f0np0",
        "enP2p1s0f0np0",
        "enp1s0f0np1",
        "enp2s0f0np0",
        "eth0",
        "enP7s7",
        "wlP9s9",
        "docker0",
    ]
    for name in names:
        (tmp_path / "class/net" / name).mkdir(parents=True)
    cages = group_cages(read_ports(tmp_path, []))
    assert {cage: [port.netdev for port in twins] for cage, twins in cages.items()} == {
        "p0": ["enp1s0f0np0", "enP2p1s0f0np0"]
    }


def test_other_vendors_and_representors_are_no_rails(tmp_path):
    other, vf = spark_ports(0)[0], spark_ports(0)[1]
    write_netdev(tmp_path, replace(other, netdev="enp9s0", pci="0000:09:00.0"), live=False)
    (tmp_path / "devices/0000:09:00.0/vendor").write_text("0x8086\n")
    write_netdev(tmp_path, replace(vf, netdev="enp1s0f0npf0vf0", port_name="pf0vf0"), live=False)
    assert read_ports(tmp_path, []) == []


def test_unreadable_attributes_count_as_absent(tmp_path):
    port = spark_ports(0)[0]
    write_netdev(tmp_path, port, live=False)
    net = tmp_path / "class/net" / port.netdev
    for name in ("carrier", "speed", "mtu", "phys_port_name"):
        (net / name).unlink()
        (net / name).mkdir()  # reading a folder fails as EINVAL does, also for root
    (found,) = read_ports(tmp_path, [])
    assert (found.cage, found.carrier, found.speed, found.mtu, found.up) == ("p0", None, None, None, False)


def test_asking_for_the_other_cage_is_not_hindered_by_our_own_addresses(node):
    up = {"carrier": "1", "speed": "200000"}
    ports = change(spark_ports(0), enp1s0f1np1=up, enP2p1s0f1np1=up)
    ours = [{"dst": "192.168.176.0/24", "dev": "enp1s0f0np0"}]
    assert node(ports, routes=ours, cage="p1").cage == "p1"
    with pytest.raises(PlanError, match="overlaps"):
        node(ports, routes=ours, cage="p1", rank=1)


RING = {"ring": True, "names": ("a", "b", "c"), "subnet": "192.168.176.0/21", "hosts": ("10.77.0.1",) * 3}


def ring_ports():
    up = {"carrier": "1", "speed": "200000", "addresses": ()}
    return [replace(port, **up) for port in spark_ports(0)]


@pytest.mark.parametrize(
    ("rank", "networks", "peers"),
    [
        (0, (176, 177, 180, 181), (1, 1, 2, 2)),
        (1, (178, 179, 176, 177), (2, 2, 0, 0)),
        (2, (180, 181, 178, 179), (0, 0, 1, 1)),
    ],
)
def test_a_ring_has_two_networks_for_each_cable(node, rank, networks, peers):
    fabric = node(ring_ports(), rank=rank, **RING)
    assert [rail.netdev for rail in fabric.rails] == ["enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"]
    assert [rail.address for rail in fabric.rails] == [f"192.168.{n}.{rank + 1}/24" for n in networks]
    for rail, network, peer in zip(fabric.rails, networks, peers, strict=True):
        ends = {rank: f"192.168.{network}.{rank + 1}", peer: f"192.168.{network}.{peer + 1}"}
        assert rail.addresses_by_rank == tuple(ends.get(other, "") for other in range(3))
    assert len({rail.rail for rail in fabric.rails}) == 4


def test_a_ring_brings_nccls_variables(node):
    assert node(ring_ports(), **RING).environment == {
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    }
    pair = node(spark_ports(1), rank=1)
    assert pair.environment == {} and pair.meeting == {"address": "192.168.176.2", "netdev": "enp1s0f0np0"}


def test_a_ring_meets_over_the_management_network(node):
    wifi = {"ifname": "wlP9s9", "addr_info": [{"family": "inet", "local": "10.9.0.3", "prefixlen": 24}]}
    routes = [{"dst": "default", "dev": "wlP9s9"}]
    assert node(ring_ports(), **RING).meeting == {"address": "10.77.0.1", "netdev": "enP7s7"}
    named = node(ring_ports(), [wifi], routes, rank=2, **(RING | {"hosts": ("a", "b", "spark-c.local")}))
    assert named.meeting == {"address": "10.9.0.3", "netdev": "wlP9s9"}
    with pytest.raises(FabricError, match=r"no interface has spark-c\.local: write the node's IPv4 address"):
        node(ring_ports(), rank=2, **(RING | {"hosts": ("a", "b", "spark-c.local")}))


def test_a_ring_that_cannot_be_is_refused(node):
    with pytest.raises(FabricError, match=r"a ring needs both cages: cage p1 .* has no link"):
        node(change(ring_ports(), enp1s0f1np1={"carrier": "0"}, enP2p1s0f1np1={"carrier": "0"}), **RING)
    with pytest.raises(
        FabricError, match=r"cage p0 .* leads to c instead of b: in a ring, port 0 .* port 1 of the next"
    ):
        node(ring_ports(), probe=lambda ports: {ports[0].netdev: {"c"}}, **RING)
    with pytest.raises(PlanError, match="2 nodes are no ring"):
        node(ring_ports(), **(RING | {"names": NAMES}))
    with pytest.raises(PlanError, match="6 rails need one /24 each, so write a /21"):
        node(ring_ports(), **(RING | {"subnet": SUBNET}))
