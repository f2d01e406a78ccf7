"""The fair policy on the real scheduler of the installed vLLM: its promises, in modelled milliseconds."""

from __future__ import annotations

import random

import proof
import pytest
import workloads


def fair(cap: int = 2, allowance: int = 512) -> dict[str, str]:
    return {
        "DSPARK_PREFILL_POLICY": "fair",
        "DSPARK_MAX_INFLIGHT_PREFILLS": str(cap),
        "DSPARK_MIXED_PREFILL_TOKENS": str(allowance),
    }


def test_short_prompts_pass_long_ones_and_live_lanes_keep_their_pace(rig):
    seen = workloads.live_and_long().run(rig, fair())
    assert (seen.skips, seen.unfinished) == ([], [])
    assert seen.gap("live") <= 400
    assert seen.ttft("short") <= 1000
    assert seen.mixed_prefill <= 512


def test_the_same_workload_on_stock_does_neither(stock):
    seen = workloads.live_and_long().run(stock, {})
    assert seen.gap("live") > 1000
    assert seen.ttft("short") > 1500


def test_a_cached_follow_up_does_not_wait_behind_a_cold_prompt(rig):
    seen = workloads.warm_followups().run(rig, fair())
    assert seen.ttft("warm") <= 1600
    assert seen.gap("live") <= 400


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(rig, cap):
    work = [(0.0, "live", 100, 2000, 0), (200.0, "long", 60_000, 4, 0)]
    work += [(300.0 + 100 * i, f"short{i}", 400, 2, 0) for i in range(900)]
    seen = workloads.Workload({"seqs": 64}, work).run(rig, fair(cap))
    assert seen.unfinished == []
    steps = 60_000 / 256
    assert seen.first_token["long"] <= steps * workloads.gb10(512, 1) * 1.1, "half of every step is the long prompt's"


@pytest.mark.parametrize("cap", [1, 2])
@pytest.mark.parametrize("loads", [1, 3])
def test_loads_in_flight_neither_block_nor_are_blocked(rig, cap, loads):
    with proof.settings(**fair(cap)):
        seen = proof.drive_loads(rig, loads=loads, prompts=3, after=40)
    assert seen.unfinished == []
    assert max(seen.first_token[f"prompt{i}"] for i in range(3)) < 40, "prompts wait for loads"


def test_prefill_alone_uses_the_whole_budget(rig):
    seen = workloads.cold_lanes(threshold=1024).run(rig, fair())
    first = min(seen.first_token.values())
    assert first <= 5 * workloads.gb10(8192, 0), "32K tokens in chunks of 8K, not of 1K"


def test_preempted_streams_resume_before_new_prompts(rig):
    """The KV cache is too small for all: streams are preempted, and none of them waits behind a fresh long prompt."""
    work = [(0.0, f"live{i}", 900, 200, 0) for i in range(8)]
    work += [(3000.0 + i, f"long{i}", 6000, 4, 0) for i in range(4)]
    seen = workloads.Workload({"blocks": 140, "budget": 2048, "caching": False}, work).run(rig, fair())
    assert seen.unfinished == []
    assert max(seen.last_token[f"live{i}"] for i in range(8)) < max(seen.first_token[f"long{i}"] for i in range(4))


def test_every_stream_keeps_its_draft_tokens_of_a_small_budget(rig):
    work = [(0.0, f"live{i}", 40, 100, 0) for i in range(30)] + [(9000.0, "long", 30_000, 2, 0)]
    seen = workloads.Workload({"budget": 128, "seqs": 32, "drafts": 3}, work).run(rig, fair())
    assert (seen.skips, seen.unfinished) == ([], [])


def test_a_long_prompt_that_outranks_the_one_in_flight_does_not_wait_for_it(rig, stock):
    work = [(0.0, f"live{i}", 300, 400, 0) for i in range(2)]
    work += [(500.0, "low", 100_000, 8, 5), (3000.0, "high", 20_000, 8, 1)]
    ranked = workloads.Workload({"threshold": 1024, "policy": "priority"}, work)
    plain = workloads.Workload({"threshold": 1024, "policy": "fcfs"}, work)
    ours, queued, theirs = ranked.run(rig, fair()), plain.run(rig, fair()), ranked.run(stock, {})
    assert (ours.unfinished, ours.skips, ours.partial) == ([], [], 2)
    assert ours.gap("live") <= 400
    assert ours.ttft("high") <= theirs.ttft("high") * 1.1, "as soon as on stock, at a third of its worst gap"
    assert ours.ttft("high") <= queued.ttft("high") / 3
    assert ours.gap("live") <= theirs.gap("live") / 3


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_random_workloads(rig, seed):
    cap = 1 + seed % 3
    seen = workloads.random_workload(seed).run(rig, fair(cap, random.Random(seed).choice([256, 512, 1024])))
    assert seen.unfinished == []
    assert seen.skips == []
    assert seen.partial <= cap + seen.preempted
