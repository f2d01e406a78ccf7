"""What changed since the last start is resolved at the next one, or named with the status of its own. Real vLLM serves.

Part of `make chaos`: each start takes a minute.
"""

from __future__ import annotations

import re

import pytest
from conftest import play
from test_chaos import AGAIN_S, node, serving, state, wait_for
from test_fabric_scenarios import OTHER, swap_cages

AGENT = "/usr/local/lib/sparkpair/sparkpair-rank"
RESOLVED = "/run/sparkpair-rank/fabric.env"
MOVE_SIMULATED_RDMA = """
cd /srv/simulated-sysfs/class/infiniband
for twin in "" P2; do
  a=roce${twin}p1s0f0 b=roce${twin}p1s0f1
  mv $a/ports /tmp/ports; mv $b/ports $a/ports; mv /tmp/ports $b/ports
  for slot in $a/ports/1/gid_attrs/ndevs/*; do echo en${twin}p1s0f0np0 >$slot; done
  for slot in $b/ports/1/gid_attrs/ndevs/*; do echo en${twin}p1s0f1np1 >$slot; done
done
"""


@pytest.fixture(scope="module", autouse=True)
def pair(fresh_lab):
    if not serving():
        play("site.yml")


def test_a_cable_that_moved_is_found_at_the_next_start_without_the_serve_stage():
    before = state("spark-b")["generation"]
    swap_cages("spark-b")
    node("spark-b", MOVE_SIMULATED_RDMA)
    play("playbooks/fabric.yml", "-e", "fabric_prove_bandwidth=never")
    # On an idle machine the stage is done before the agents miss each other, and the pair serves on: ask for a start.
    node("spark-a", f"{AGENT} --restart")
    wait_for(lambda: serving(before), AGAIN_S, "the pair over the other cage")
    found = node("spark-b", f"cat {RESOLVED}")
    assert f'GLOO_SOCKET_IFNAME="{OTHER[0]}"' in found
    assert 'NCCL_IB_HCA="=rocep1s0f1:1,roceP2p1s0f1:1"' in found


def test_an_address_that_is_gone_ends_the_start_with_its_status_until_it_is_back():
    before = state("spark-b")["generation"]
    node("spark-b", f"""sed -i 's/^{{/{{"wait_seconds": 3,/' /etc/sparkpair/fabric.json
                        ip address delete 192.168.177.2/24 dev {OTHER[1]}""")  # fmt: skip
    node("spark-a", f"{AGENT} --restart")
    sentence = r"ResolveError: spark-b: no interface has the address 192\.168\.177\.2 .*\(exit status 11\)"
    status = "systemctl show -p StatusText sparkpair-rank"
    wait_for(lambda: re.search(sentence, node("spark-a", status)), 90, "the sentence in the unit's status")
    node("spark-b", f"ip address add 192.168.177.2/24 dev {OTHER[1]}")
    node("spark-a", f"{AGENT} --reset")
    wait_for(lambda: serving(before), AGAIN_S, "the pair with the address back")
