"""Measuring the rails: what the tools print, and the verdict on every number that owners reported."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible.module_utils.sparkpair import fabric_bandwidth as bandwidth
from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_bandwidth import Measured, as_rows, judge, parse_iperf, parse_perftest
from conftest import ROOT

from lab.simulated_rdma import spark_ports, write, write_hca

VERDICTS = yaml.safe_load((ROOT / "roles/fabric/vars/main.yml").read_text())["__fabric_verdicts"]
HEADER = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
BLOCK = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF            Device         : rocep1s0f0
 Mtu             : 4096[B]
 GID index       : 3
---------------------------------------------------------------------------------------
 GID:            00:00:00:00:00:00:00:00:00:00:255:255:192:168:176:02
---------------------------------------------------------------------------------------
"""
RAILS = [
    {
        "rail": rail,
        "netdev": port.netdev,
        "hca": port.hca,
        "addresses_by_rank": [f"192.168.{176 + rail}.1", f"192.168.{176 + rail}.2"],
    }
    for rail, port in enumerate(spark_ports(1)[:2])
]


@pytest.mark.parametrize(
    ("row", "gbps"),
    [
        (" 65536      882805           0.00               92.57                0.176554\n", 92.57),
        (" 1048576 5000 13.22 13.22 0.001576\n", 13.22),
        ("", None),
        (" Completion with error at client\n", None),
    ],
)
def test_perftest_rows_are_read_by_the_names_of_the_columns(row, gbps):  # S10, S11
    assert parse_perftest(BLOCK + HEADER + row) == gbps
    other = " #bytes  BW average[Gb/sec]  #iterations\n"
    if gbps:
        assert parse_perftest(BLOCK + other + f" 65536  {gbps}  5000\n") == gbps
    assert parse_perftest(BLOCK) is None and parse_perftest("") is None


def test_megabytes_are_converted():
    header = HEADER.replace("Gb/sec", "MB/sec")
    assert parse_perftest(f"{header} 65536 5000 11000.00 11000.00 0.17\n") == pytest.approx(92.27, abs=0.01)


def test_iperf_is_read_from_its_json():
    assert parse_iperf(json.dumps({"end": {"sum_received": {"bits_per_second": 2.35e10}}})) == 23.5
    assert parse_iperf('{"error": "unable to connect"}') is None and parse_iperf("") is None


def judged(gbps, rail="0", tool="ib_write_bw", share=1.0):
    sent = None if gbps is None else int(gbps / 8 * 1e9 * 5 * share)
    return judge(Measured(rail, "enp1s0f0np0", "b -> a", tool, gbps, sent), VERDICTS, 5)


@pytest.mark.parametrize(
    ("gbps", "rail", "ok", "words"),
    [
        (111.2, "0", True, "healthy"),
        (92.57, "1", True, "healthy"),
        (190.4, "all", True, "healthy"),
        (13.22, "0", False, "hot-plug"),
        (26.4, "all", False, "hot-plug"),
        (24.2, "0", False, "hot-plug"),
        (31.0, "0", False, "degraded"),
        (54.0, "1", False, "half"),
        (98.0, "all", False, "half"),
        (161.0, "all", False, "half"),
        (2.0, "0", False, "hardly anything"),
        (0.0, "all", False, "hardly anything"),
        (None, "0", False, "header without a row"),
    ],
)
def test_the_verdict_table(gbps, rail, ok, words):  # S10, S11, S13
    found = judged(gbps, rail)
    assert (found.ok, words in found.verdict) == (ok, True), found
    assert bool(found.mend) != ok


def test_traffic_that_does_not_count_on_the_rdma_port_is_a_tcp_fallback():
    assert judged(95.0, share=0.01).verdict == "TCP fallback"
    assert "rdma link" in judged(95.0, share=0.0).mend


def test_errors_that_a_link_counted_while_it_sent_or_received_are_a_row_of_their_own(tmp_path):
    for port in spark_ports(1)[:2]:
        write_hca(tmp_path, port)
    folder = tmp_path / "class/infiniband/roceP2p1s0f0/ports/1/counters"
    write(folder / "symbol_error", "3")
    before = bandwidth.errors(RAILS, tmp_path)
    assert bandwidth.count("spark-b", RAILS, before, tmp_path) == []
    write(folder / "symbol_error", "10")
    write(folder / "port_rcv_data", "99")
    (row,) = as_rows(bandwidth.count("spark-b", RAILS, before, tmp_path))
    assert not row["ok"] and row["line"].startswith("spark-b  rail 1      counters ")
    assert row["line"].endswith("errors on the link: symbol_error +7: reseat or replace the cable")
    assert bandwidth.count("spark-b", RAILS, {}, tmp_path) == []


def test_the_stand_in_says_that_it_is_one():
    found = judged(23.0, tool="iperf3")
    assert found.ok and "TCP stand-in" in found.verdict
    assert not judged(None, tool="iperf3").ok
    (row,) = as_rows([found])
    assert row["line"] == f"b -> a  rail 0      iperf3         23.0 Gb/s  {bandwidth.STAND_IN}"


def test_both_ends_get_their_own_command(tmp_path):
    for port in spark_ports(1)[:2]:
        write_hca(tmp_path, port)
    rail = RAILS[1]
    assert " ".join(bandwidth.tool(True, rail, 1, 0, 5, tmp_path)) == (
        "ib_write_bw -d roceP2p1s0f0 -x 3 -p 18516 -D 5 -F --report_gbits 192.168.177.1"
    )
    assert bandwidth.tool(True, rail, 1, 1, 5, tmp_path)[-1] == "--report_gbits"
    assert bandwidth.tool(False, rail, 0, 0, 5, tmp_path) == ["iperf3", "-s", "-B", "192.168.177.1", "-p", "18516"]
    with pytest.raises(FabricError, match=r"roceP2p1s0f0 has no RoCE v2 GID for 192\.168\.177\.1"):
        bandwidth.tool(True, rail, 0, 0, 5, tmp_path)


def test_each_rail_alone_and_then_all_at_once(tmp_path, monkeypatch):
    for port in spark_ports(1)[:2]:
        write_hca(tmp_path, port)
    asked = []

    def fake(command, seconds):
        hca = command[command.index("-d") + 1]
        counter = tmp_path / f"class/infiniband/{hca}/ports/1/counters"
        write(counter / "port_xmit_data", "15625000000")
        asked.append(hca)
        return f"{HEADER} 65536 5000 0.00 98.50 0.17\n"

    monkeypatch.setattr(bandwidth, "run_quietly", fake)
    found = bandwidth.measure(RAILS, 1, 0, "b -> a", 5, True, tmp_path)
    assert [(one.rail, one.gbps) for one in found] == [("0", 98.5), ("1", 98.5), ("all", 197.0)]
    assert sorted(asked) == ["roceP2p1s0f0"] * 2 + ["rocep1s0f0"] * 2
    assert found[0].sent == 62_500_000_000
