"""The environment on the real pair: one for both nodes, changed by hand, by another lock, and back to the one before.

Stands on a pair that serves. `make test` runs what is quick, `make chaos` (CHAOS=full) the second environment too.
"""

from __future__ import annotations

import json
import os
import re
import time

import pytest
from conftest import ROOT, play
from test_chaos import AGAIN_S, FULL, NODES, first, journal, node, serving, state, wait_for

pytestmark = pytest.mark.usefixtures("fresh_lab")
CURRENT = "/opt/sparkpair/current"
SITE = f"{CURRENT}/lib/python3*/site-packages"
SWITCH_S = 10.0
"""Longest rollback, from the command to the start of the pair's next generation."""


def current(name: str) -> str:
    return node(name, f"readlink {CURRENT}").strip().removeprefix("envs/")


def end_generation() -> None:
    node("spark-b", "pkill -9 -f ^VLLM::Worker")


def test_both_nodes_have_one_environment_and_the_second_got_it_from_the_first():
    if not state("spark-a"):
        play("site.yml")
    manifests = [json.loads(node(name, f"cat {CURRENT}/sparkpair-env.json")) for name in NODES]
    assert manifests[0] == manifests[1]
    assert manifests[0]["files"] > 10_000 and manifests[0]["capabilities"]["nnodes"]
    assert "none" in node("spark-b", "ls /srv/wheelhouse 2>/dev/null || echo none")
    assert re.search(r"copied 0\.\d+ of 0\.\d+ GB", node("spark-b", "cat /var/log/sparkpair/vllm_env_wheels.log"))
    caches = f"/var/cache/sparkpair-rank/{current('spark-b')}-*"
    assert node("spark-b", f"stat -c %U {caches}").split() == ["sparkpair"]


def test_a_package_installed_by_hand_is_refused_by_name_and_the_next_run_repairs():
    wait_for(serving, AGAIN_S, "serving")
    generation = state("spark-a")["generation"]
    folder = "$(ls -d " + SITE + ")/handmade-1.0.dist-info"
    node("spark-b", f"mkdir {folder}; echo 'Name: handmade' > {folder}/METADATA; touch {folder}/RECORD")
    end_generation()
    wait_for(lambda: "package handmade 1.0 added" in state("spark-a").get("text", ""), 60, "the refusal")
    text = state("spark-a")["text"]
    print(text)
    assert "not started, spark-b: found 2 files that differ from what was installed" in text
    output = play("playbooks/vllm_env.yml")
    assert "is damaged and built anew: found 2 files" in " ".join(output.split())
    play("playbooks/hotfix.yml")
    wait_for(lambda: serving(generation), AGAIN_S, "mended")


@pytest.fixture(scope="module")
def other_lock():
    """The lab's lock without one package that nothing needs at run time: another environment."""
    lock = node("spark-a", f"cat {CURRENT}/requirements.txt")
    path = ROOT / ".cache" / f"another-lock-{os.getpid()}.txt"
    path.write_text(re.sub(r"^fastapi-cli==(?:.*\\\n)*.*\n", "", lock, flags=re.MULTILINE))
    assert path.read_text() != lock
    yield f"../.cache/{path.name}"
    path.unlink()


def go(playbook: str, *arguments: str) -> tuple[float, float, float]:
    """Run a playbook; returns seconds until the pair's next generation starts, of that start, and of all."""
    began = time.time()
    output = play(playbook, *arguments)
    total = time.time() - began
    assert "sparkpair: serving, proven" in output, output[-3000:]
    entries = journal(began)
    switched = first(entries, r"generation \d+ starts", began)
    start = next(
        re.search(r"serving ([\d.]+) s after", text) for _, _, text in reversed(entries) if "s after the start" in text
    )
    assert switched and start
    return switched, float(start[1]), total


@pytest.mark.skipif(not FULL, reason="make chaos")
def test_another_lock_goes_in_service_and_back_and_forward_again(other_lock):
    wait_for(serving, AGAIN_S, "serving")
    old = current("spark-a")
    settings = ["-e", f"vllm_env_lock={other_lock}", "-e", "serve_max_inflight_prefills=1", "-e", "hotfix_state=absent"]
    for stage in ("vllm_env", "hotfix", "serve"):  # preflight takes locks out of locks/ alone
        play(f"playbooks/{stage}.yml", *settings)
    new = current("spark-a")
    assert new != old and current("spark-b") == new
    for wanted, cap, patched in ((old, "2", True), (new, "1", False)):
        switched, start, total = go("playbooks/rollback.yml")
        print(f"rollback: {switched:.1f} s until the start, start {start:.1f} s, all {total:.1f} s with its proof")
        assert [current(name) for name in NODES] == [wanted, wanted]
        assert switched < SWITCH_S
        for name in NODES:
            shown = node(name, "tr '\\0' '\\n' < /proc/$(pgrep -f '[b]in/vllm serve')/environ")
            assert f"DSPARK_MAX_INFLIGHT_PREFILLS={cap}" in shown
            assert f"TRITON_CACHE_DIR=/var/cache/sparkpair-rank/{wanted}-" in shown
            assert (".orig" in node(name, f"ls {SITE}/vllm/v1/core/sched")) == patched
    # What the inventory names wins at the next run.
    play("site.yml")
    assert [current(name) for name in NODES] == [old, old]


@pytest.mark.skipif(not FULL, reason="make chaos")
def test_another_lock_on_one_node_is_refused_by_name_until_it_is_mended():
    wait_for(serving, AGAIN_S, "serving")
    generation, old = state("spark-a")["generation"], current("spark-a")
    (new,) = set(node("spark-b", "ls /opt/sparkpair/envs").split()) - {old}
    node("spark-b", f"ln -sfn envs/{new} {CURRENT}")
    end_generation()
    wait_for(lambda: f"found environment and scheduler {new}-" in state("spark-a").get("text", ""), 60, "the refusal")
    # The same with settings of that environment, as after a rollback on one node alone.
    node("spark-b", "systemctl stop sparkpair-rank; sed -i.kept '/^SPARKPAIR_SERVES=/d' /etc/sparkpair/rank.env")
    node("spark-b", "systemctl start --no-block sparkpair-rank")
    wait_for(lambda: "packages differ" in state("spark-a").get("text", ""), 60, "the packages")
    text = state("spark-a")["text"]
    print(text)
    assert "waiting for spark-b: packages differ: none there, fastapi-cli 0." in text
    node("spark-b", f"ln -sfn envs/{old} {CURRENT}; mv /etc/sparkpair/rank.env.kept /etc/sparkpair/rank.env")
    node("spark-b", "systemctl stop sparkpair-rank; systemctl start --no-block sparkpair-rank")
    wait_for(lambda: serving(generation), AGAIN_S, "mended")
