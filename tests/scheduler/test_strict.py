"""The strict policy on the real scheduler of the installed vLLM."""

from __future__ import annotations

import proof
import pytest
import workloads

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

    def tracked(gate, request, _scheduled):
        full = len(gate.scheduler._inflight_prefills) >= gate.settings.cap
        return rig.runtime.STOP if full else rig.runtime.ADMIT

    monkeypatch.setattr(rig.runtime.StrictGate, "before_lookup", tracked)
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


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_random_workloads(rig, seed):
    cap = 1 + seed % 3
    seen = workloads.random_workload(seed).run(rig, strict(cap))
    assert seen.unfinished == []
    assert seen.partial <= cap + seen.preempted, "preempted streams are never held; nobody else is above the cap"
