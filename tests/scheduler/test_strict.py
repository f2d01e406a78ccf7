"""The strict policy on the real scheduler of the installed vLLM."""

from __future__ import annotations

import random

import proof
import pytest

CAP = "DSPARK_MAX_INFLIGHT_PREFILLS"


def strict(cap: int) -> dict[str, str]:
    return {CAP: str(cap), "DSPARK_PREFILL_POLICY": "strict"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_cold_lanes_keep_the_cap_exactly(rig, cap, policy, asynchronous):
    with proof.settings(**strict(cap)):
        scheduler = rig.scheduler(threshold=1024, policy=policy, asynchronous=asynchronous)
        seen = proof.drive(rig, scheduler, proof.cold_lanes(rig), asynchronous=asynchronous)
    assert (seen.partial, seen.skips, seen.unfinished) == (cap, [], [])


def test_stock_does_not_keep_it(stock):
    seen = proof.drive(stock, stock.scheduler(threshold=1024), proof.cold_lanes(stock))
    assert seen.partial == 6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_live_lanes_decode_in_every_step_beside_long_prompts(rig, asynchronous):
    with proof.settings(**strict(1)):
        scheduler = rig.scheduler(threshold=1024, asynchronous=asynchronous)
        seen = proof.drive(rig, scheduler, proof.live_and_long(rig), asynchronous=asynchronous)
    assert (seen.skips, seen.unfinished) == ([], [])
    assert seen.partial == 1


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("loads", [1, 2, 5])
def test_loads_in_flight_neither_block_nor_are_blocked(rig, cap, loads):
    with proof.settings(**strict(cap)):
        seen = proof.drive_loads(rig, loads=loads, prompts=3, after=40)
    assert seen.unfinished == []
    assert max(seen.first_token[f"prompt{i}"] for i in range(3)) < 40, "prompts wait for loads"


def test_the_probe_catches_the_rule_that_deadlocks(rig, monkeypatch):
    """Counting vLLM's own set of prefills in flight, as one published hotfix does, never serves anybody."""
    monkeypatch.setattr(
        rig.runtime.StrictGate, "_count", lambda gate, _scheduled: len(gate.scheduler._inflight_prefills)
    )
    monkeypatch.setattr(rig.runtime, "holds_work", lambda _request: False)
    monkeypatch.setattr(rig.runtime.StrictGate, "end", lambda _gate, _scheduled: None)
    monkeypatch.setattr(rig.runtime.StrictGate, "_exempt", lambda _gate, _request: False)
    with proof.settings(**strict(1)):
        seen = proof.drive_loads(rig, loads=2, prompts=2)
    assert any(name.startswith("prompt") for name in seen.unfinished)


def test_off_is_stock(rig, stock):
    """Step by step the same tokens for the same requests."""
    for asynchronous in (False, True):
        steps = []
        for r, env in ((rig, {"DSPARK_PREFILL_HOTFIX_OFF": "1", CAP: "1"}), (stock, {})):
            with proof.settings(**env):
                scheduler = r.scheduler(threshold=512, asynchronous=asynchronous, blocks=1400)
            trace: list[dict[str, int]] = []
            schedule = scheduler.schedule

            def traced(*args, schedule=schedule, trace=trace):
                out = schedule(*args)
                trace.append(dict(out.num_scheduled_tokens))
                return out

            scheduler.schedule = traced
            proof.drive(r, scheduler, proof.live_and_long(r), asynchronous=asynchronous)
            steps.append(trace)
        assert steps[0] == steps[1]


def random_run(rig, seed, *, policy, env):
    """One random workload: sizes, settings and arrivals from ``seed``."""
    r = random.Random(seed)
    budget = r.choice([512, 2048, 8192])
    asynchronous = r.random() < 0.5
    drafts = 0 if asynchronous else r.choice([0, 0, 3])
    caching = r.random() < 0.3
    work = []
    for i in range(r.randint(4, 30)):
        prompt = r.choice([r.randint(5, 60), r.randint(100, 900), r.randint(2000, 9000)])
        out = r.choice([1, 2, 8, 40])
        arrival = r.choice([0, r.randint(0, 80)])
        work.append((arrival, f"r{i}", prompt, out, r.randint(0, 3)))
    need = max(-(-(p + o + 64) // proof.BLOCK) for _, _, p, o, _ in work) + 8
    blocks = int(need * r.uniform(1.1, 2.5)) + 4 if r.random() < 0.35 else 60000
    with proof.settings(**env):
        scheduler = rig.scheduler(
            asynchronous=asynchronous, budget=budget, threshold=min(r.choice([0, 0, 128, 512]), budget),
            seqs=r.choice([8, 16, 64]), blocks=blocks, policy=r.choice(["fcfs", "fcfs", "priority"]), caching=caching,
            drafts=drafts, max_len=32768,
        )  # fmt: skip
    arrivals = [
        (when, rig.request(n, prompt, out, priority=p, arrival=1.0 + when, caching=caching))
        for when, n, prompt, out, p in work
    ]
    return proof.drive(rig, scheduler, arrivals, asynchronous=asynchronous), arrivals


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_random_workloads(rig, seed):
    cap = 1 + seed % 3
    seen, arrivals = random_run(rig, seed, policy="strict", env=strict(cap))
    assert seen.unfinished == []
    preempted = sum(r.num_preemptions > 0 for _, r in arrivals)
    assert seen.partial <= cap + preempted, "preempted streams are never held; nobody else is above the cap"
