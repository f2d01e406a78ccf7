"""The settings parser and the admission gate, on requests of our own."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
import types
from types import SimpleNamespace

import pytest
from ansible.module_utils.sparkpair import hotfix_patcher as patcher
from ansible.module_utils.sparkpair import hotfix_runtime as runtime
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.hotfix_fixture import RUNTIME, TOY

CAP = "DSPARK_MAX_INFLIGHT_PREFILLS"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in (CAP, "DSPARK_PREFILL_POLICY", "DSPARK_ISSUE43_SCHED_DIAG", "DSPARK_PREFILL_HOTFIX_OFF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("raw", "configured", "cap", "warned"),
    [
        ("1", None, 1, False),
        (" 2 ", None, 2, False),
        ("+3", None, 3, False),
        ("4", None, 3, False),
        ("99999999999999999999", None, 3, False),
        ("", None, 1, False),
        ("   ", 2, 2, False),
        ("0", 2, 2, False),
        ("-1", None, 1, False),
        ("", 7, 3, False),
        ("", 0, 1, False),
        ("two", None, 1, True),
        ("2.0", 2, 2, True),
        ("1x", None, 1, True),
        ("1_0", None, 1, True),
        ("٣", None, 1, True),
        ("0x2", 9, 3, True),
    ],
)
def test_cap(raw, configured, cap, warned):
    settings = runtime.Settings({CAP: raw}, configured)
    assert settings.cap == cap
    assert len(settings.warnings) == warned
    assert all(CAP in line for line in settings.warnings)


@given(st.text(), st.one_of(st.none(), st.integers(), st.text()))
def test_cap_is_always_1_to_3(raw, configured):
    assert runtime.Settings({CAP: raw}, configured).cap in (1, 2, 3)


@pytest.mark.parametrize(("raw", "on"), [("", 0), ("0", 0), ("False", 0), ("no", 0), ("OFF", 0), ("1", 1), ("yes", 1)])
def test_flags(raw, on):
    settings = runtime.Settings({"DSPARK_ISSUE43_SCHED_DIAG": raw, "DSPARK_PREFILL_HOTFIX_OFF": raw})
    assert (settings.diag, settings.off) == (on, on)


def test_unknown_policy_is_strict_with_a_warning():
    settings = runtime.Settings({"DSPARK_PREFILL_POLICY": "fast"})
    assert settings.policy == "strict"
    assert "DSPARK_PREFILL_POLICY" in settings.warnings[0]


def request(name, total, computed=0, *, prompt=None, status="WAITING", max_tokens=10, priority=0):
    return SimpleNamespace(
        request_id=name,
        num_tokens=total,
        num_tokens_with_spec=total,
        num_prompt_tokens=total if prompt is None else prompt,
        num_computed_tokens=computed,
        max_tokens=max_tokens,
        priority=priority,
        lora_request=None,
        status=SimpleNamespace(name=status),
    )


@pytest.mark.parametrize(
    ("what", "req", "partial"),
    [
        ("a prompt not begun", request("a", 100), True),
        ("the last prompt token is left", request("a", 100, 99), True),
        ("the prompt is done, the first token not back yet", request("a", 100, 100), False),
        ("a decoder that was not scheduled yet", request("a", 101, 100, prompt=100), False),
        ("asynchronous: placeholders count as computed", request("a", 101, 103, prompt=100), False),
        ("resumed, replays its prompt", request("a", 150, 20, prompt=100), True),
        ("resumed, prompt done, replays thousands of outputs", request("a", 5000, 200, prompt=100), True),
        ("resumed, one output token left, a decode", request("a", 5000, 4999, prompt=100), False),
        ("rewound by a failed load", request("a", 140, 64, prompt=100), True),
    ],
)
def test_counting_rule(what, req, partial):
    assert (runtime.remaining_tokens(req) > 0) is partial, what


def gate(running=(), waiting=(), *, cap=1, **attributes):
    scheduler = SimpleNamespace(running=list(running), waiting=list(waiting), max_model_len=10_000, **attributes)
    return runtime.StrictGate(scheduler, runtime.Settings({CAP: str(cap)})).begin()


def test_holds_and_ends_the_loop_at_the_cap():
    assert gate([request("a", 100, 50)]).before_lookup(request("b", 10), {"a": 10}) == runtime.STOP
    assert gate([request("a", 100, 50)], cap=2).before_lookup(request("b", 10), {"a": 10}) == runtime.ADMIT


def test_a_prefill_holds_its_slot_through_its_last_chunk():
    assert gate([request("a", 100, 90)]).before_lookup(request("b", 10), {"a": 10}) == runtime.STOP


def test_counts_those_admitted_in_this_step_if_they_stay_partial():
    g = gate()
    assert g.before_lookup(request("b", 10), {}) == runtime.ADMIT
    g.scheduler.running.append(request("b", 10))
    assert g.before_lookup(request("c", 500), {"b": 10}) == runtime.ADMIT
    g.scheduler.running.append(request("c", 500))
    assert g.before_lookup(request("d", 10), {"b": 10, "c": 90}) == runtime.STOP


def test_loads_in_flight_do_not_count():
    loading = request("l", 100, 99, status="WAITING_FOR_REMOTE_KVS")
    g = gate(waiting=[loading], _inflight_prefills=[loading])
    assert g.before_lookup(request("b", 10), {}) == runtime.ADMIT


@pytest.mark.parametrize("req", [request("p", 100, status="PREEMPTED"), request("k", 100, 99)])
def test_never_holds_who_holds_work(req):
    assert gate([request("a", 100, 50)]).before_lookup(req, {"a": 10}) == runtime.ADMIT


@pytest.mark.parametrize(
    "later",
    [request("p", 100, status="PREEMPTED"), request("k", 100, 99), request("l", 9, 8, status="WAITING_FOR_REMOTE_KVS")],
)
def test_looks_past_a_held_prompt_for_who_must_not_wait(later):
    first = request("b", 10)
    g = gate([request("a", 100, 50)], [first, later], finished_recving_kv_req_ids={"l"})
    assert g.before_lookup(first, {"a": 10}) == runtime.SKIP
    later.status.name = "PREEMPTED"  # what the scheduler makes of a finished load on its way here
    assert g.before_lookup(later, {"a": 10}) == runtime.ADMIT
    assert g.before_lookup(request("c", 10), {"a": 10}) == runtime.STOP


def test_an_engine_that_cannot_move_admits_one():
    g = gate([request("a", 100, 50)])
    assert g.before_lookup(request("b", 10), {}) == runtime.STOP, "one empty step is no proof"
    g.end({})
    assert g.begin().before_lookup(request("b", 10), {}) == runtime.ADMIT


def test_a_backlog_is_reported_as_capacity():
    g = gate([request("a", 100, 50)], prefill_capacity_bound=False)
    g.before_lookup(request("b", 10), {"a": 10})
    g.end({"a": 10})
    assert g.scheduler.prefill_capacity_bound is True


def test_warns_at_most_16_times_of_what_vllm_does_not_track(caplog):
    with caplog.at_level(logging.WARNING):
        g = gate([request("a", 100, 50)], _inflight_prefills=set())
        for _ in range(40):
            g.begin().before_lookup(request("b", 10), {"a": 10})
    assert len(caplog.records) == runtime.MAX_WARNINGS
    assert "a" in caplog.records[0].message


def load_toy(monkeypatch):
    """The toy scheduler with the hooks, as a module beside the runtime."""
    for name in ("toy", "toy.sched"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    spec = importlib.util.spec_from_loader("toy.sched.dspark_prefill", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(RUNTIME, "dspark_prefill.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "toy.sched.dspark_prefill", module)
    toy = types.ModuleType("toy.sched.scheduler")
    toy.__package__ = "toy.sched"
    exec(compile(patcher.patch(TOY.encode(), 1), "scheduler.py", "exec"), toy.__dict__)
    return toy.Scheduler


def run(scheduler, steps):
    partial = []
    for _ in range(steps):
        out = scheduler.schedule()
        partial.append(sum(runtime.remaining_tokens(r) > 0 for r in scheduler.running))
        for r in [r for r in scheduler.running if r.num_computed_tokens >= r.num_tokens]:
            if r.num_tokens - r.num_prompt_tokens >= r.max_tokens:
                scheduler.running.remove(r)
            else:
                r.num_tokens += 1
                r.num_tokens_with_spec += 1
        assert out or not scheduler.running
    return partial


def toy(cls, *, configured=None):
    config = SimpleNamespace() if configured is None else SimpleNamespace(max_num_partial_prefills=configured)
    scheduler = cls(config, budget=100, threshold=20)
    scheduler.waiting.extend(request(f"r{i}", 90) for i in range(6))
    return scheduler


@pytest.mark.parametrize(("cap", "seen"), [("1", 1), ("2", 2), ("3", 3), ("", 2), ("off", 5)])
def test_the_hooks_keep_the_cap(monkeypatch, cap, seen):
    if cap == "off":
        monkeypatch.setenv("DSPARK_PREFILL_HOTFIX_OFF", "1")
    monkeypatch.setenv(CAP, "1" if cap == "off" else cap)
    scheduler = toy(load_toy(monkeypatch), configured=2)
    partial = run(scheduler, 120)
    assert max(partial) == seen
    assert not scheduler.running and not scheduler.waiting


def test_attach_logs_once_and_sets_the_attribute(monkeypatch, caplog):
    monkeypatch.setenv(CAP, "2")
    monkeypatch.setenv("DSPARK_ISSUE43_SCHED_DIAG", "1")
    with caplog.at_level(logging.INFO):
        scheduler = toy(load_toy(monkeypatch))
    assert scheduler._dspark_max_inflight_prefills == 2
    assert [r.message for r in caplog.records] == [
        "[issue27-hotfix] in-flight prefill cap=2 policy=strict diag=1 "
        f"revision={runtime.REVISION} threshold=0 budget=0"
    ]


def test_the_environment_is_read_only_at_construction(monkeypatch):
    monkeypatch.setenv(CAP, "2")
    scheduler = toy(load_toy(monkeypatch))
    monkeypatch.setenv(CAP, "3")
    assert max(run(scheduler, 60)) == 2


def test_diag_lines_parse_and_show_a_skipped_decode(monkeypatch, caplog):
    monkeypatch.setenv("DSPARK_ISSUE43_SCHED_DIAG", "1")
    cls = load_toy(monkeypatch)
    scheduler = cls(SimpleNamespace(), budget=10)
    scheduler.running = [request("long", 1000, 10), request("lane", 101, 100, prompt=100)]
    with caplog.at_level(logging.INFO):
        scheduler.schedule()
        scheduler.schedule()
    lines = [re.fullmatch(r"\[issue43-step (\d+)\] (\{.*\})", r.message) for r in caplog.records]
    records = {int(m[1]): json.loads(m[2]) for m in lines if m}
    assert list(records) == [1, 2]
    assert records[1]["prefill"] == {"long": 10}
    assert records[1]["live"] == 1
    assert records[2]["decode_skips"] == {"lane": {"position": 1, "run": 2}}


def fair_gate(running=(), waiting=(), *, cap=2, allowance=512, budget=8192, policy="fcfs", **attributes):
    scheduler = SimpleNamespace(
        running=list(running), waiting=list(waiting), max_model_len=10**6, max_num_scheduled_tokens=budget,
        num_spec_tokens=0, scheduler_config=SimpleNamespace(long_prefill_token_threshold=1024, policy=policy),
        **attributes,
    )  # fmt: skip
    environ = {CAP: str(cap), "DSPARK_MIXED_PREFILL_TOKENS": str(allowance)}
    return runtime.FairGate(scheduler, runtime.Settings(environ)).begin()


LANE = request("lane", 101, 100, prompt=100)
LONG = request("long", 100_000, 5000)


@pytest.mark.parametrize(
    ("running", "waiting", "given"),
    [
        ([LONG], [], 8192),
        ([LONG, LANE], [], 512),
        ([LONG, LANE], [request("s", 100)], 412),
        ([LONG, LANE], [request("other", 50_000)], 512),
        ([LONG, LANE], [request("s", 2000)], 256),
    ],
)
def test_what_a_long_prefill_gets(running, waiting, given):
    assert fair_gate(running, waiting).clip(LONG, 8192, 8192) == given


def test_streams_keep_their_part_of_a_small_budget():
    lanes = [request(f"lane{i}", 101, 100, prompt=100) for i in range(40)]
    assert fair_gate([LONG, *lanes], budget=128).clip(LONG, 128, 128) == 88


def test_a_request_that_fits_passes_and_one_that_does_not_is_held():
    g = fair_gate([LONG, LANE], [request("s", 100)])
    scheduled = {"long": g.clip(LONG, 8192, 8192), "lane": 1}
    for name, total, verdict in (("other", 50_000, runtime.SKIP), ("s", 100, runtime.ADMIT), ("t", 600, runtime.SKIP)):
        req = request(name, total)
        assert g.before_lookup(req, scheduled) == runtime.ADMIT
        tokens = g.chunk(req, 0, total)
        assert g.after_lookup(req, 0, tokens, scheduled, False) == verdict, name
        if verdict == runtime.ADMIT:
            g.scheduler.running.append(req)
            scheduled[name] = tokens
    assert sum(scheduled.values()) == 513


def test_a_held_request_is_not_looked_up_again_for_a_while():
    g = fair_gate([LONG, LANE])
    other = request("other", 50_000)
    scheduled = {"long": g.clip(LONG, 8192, 8192)}
    verdicts = []
    for _ in range(40):
        verdict = g.before_lookup(other, scheduled)
        if verdict == runtime.ADMIT:
            verdict = g.after_lookup(other, 0, g.chunk(other, 0, 8192), scheduled, False) + 10
        verdicts.append(verdict)
        g.end(scheduled)
        g.begin()
        g.clip(LONG, 8192, 8192)
    assert verdicts == [11] + [runtime.SKIP] * 31 + [11] + [runtime.SKIP] * 7


def test_looks_at_16_held_requests_and_no_more_but_for_who_must_not_wait():
    preempted = request("p", 900, status="PREEMPTED")
    for behind, last in (([], runtime.STOP), ([preempted], runtime.SKIP)):
        g = fair_gate([LONG, LANE], behind)
        scheduled = {"long": g.clip(LONG, 8192, 8192)}
        for i in range(16):
            req = request(f"h{i}", 50_000)
            assert g.before_lookup(req, scheduled) == runtime.ADMIT
            assert g.after_lookup(req, 0, g.chunk(req, 0, 8192), scheduled, False) == runtime.SKIP
        assert g.before_lookup(request("h16", 50_000), scheduled) == last
    assert g.before_lookup(preempted, scheduled) == runtime.ADMIT
    assert g.after_lookup(preempted, 0, g.chunk(preempted, 0, 900), scheduled, False) == runtime.ADMIT
    assert g.before_lookup(request("h17", 50_000), scheduled) == runtime.STOP


def test_a_stalled_prefill_is_let_through_after_8_steps():
    g = fair_gate([LONG, LANE])
    for _ in range(runtime.MOST_STALLED):
        assert g.clip(LONG, 8192, 8192) == 512
        g.end({"lane": 1})
        g.begin()
    assert g.clip(LONG, 8192, 8192) == 8192


def test_the_report_says_why_and_how_long_a_request_is_held_and_why_another_is_not():
    g = fair_gate([LONG, LANE], _inflight_prefills=[LONG, request("gone", 9), request("l", 9)])
    g.scheduler._inflight_prefills[2].status.name = "WAITING_FOR_REMOTE_KVS"
    g.settings.diag = True
    held = [request(name, 50_000) for name in ("one", "two")]
    for step in range(3):
        g.begin()
        scheduled = {"long": g.clip(LONG, 8192, 8192), "lane": 1}
        for req in held[: 1 + step]:
            if g.before_lookup(req, scheduled) == runtime.ADMIT:
                g.after_lookup(req, 0, g.chunk(req, 0, 8192), scheduled, False)
        for req, loading in ((request("load", 900), True), (request("hit", 900), False)):
            assert g.after_lookup(req, 899, 1, scheduled, loading) == runtime.ADMIT
        assert g.after_lookup(request("p", 900, status="PREEMPTED"), 0, 1, scheduled, False) == runtime.ADMIT
        g.end(scheduled)
        report = g.report(scheduled)
    assert report["held"] == {"one": "share", "two": "share"}
    assert report["exempt"] == {"load": "loads", "hit": "cached", "p": "preempted"}
    assert (report["oldest_hold"], report["overcounted"], report["tracked"]) == (2, ["gone"], 3)
    assert (report["allowance"], report["used"], report["boost"]) == (512, 513, False)
    json.dumps(report)


def test_a_prompt_that_outranks_all_gets_the_last_slot_and_the_share():
    low, lane = request("low", 100_000, 5000, priority=5), request("lane", 101, 100, prompt=100)
    for rank, verdict in ((5, runtime.SKIP), (6, runtime.SKIP), (4, runtime.ADMIT)):
        g = fair_gate([low, lane], policy="priority")
        scheduled = {"low": g.clip(low, 8192, 8192), "lane": 1}
        assert scheduled["low"] == 512, "alone it has the whole share"
        high = request("high", 50_000, priority=rank)
        assert g.before_lookup(high, scheduled) == runtime.ADMIT
        chunk = g.chunk(high, 0, 8192)
        assert (chunk, g.after_lookup(high, 0, chunk, scheduled, False)) == (1, verdict), rank
    g.scheduler.running.append(high)
    high.num_computed_tokens = 1
    g.begin()
    assert (g.clip(low, 8192, 8192), g.clip(high, 8192, 8192)) == (512 // 16, 512 - 512 // 16)
    third = request("third", 50_000, priority=0)
    assert g.before_lookup(third, {"low": 1}) == runtime.ADMIT
    assert g.after_lookup(third, 0, 1, {"low": 1}, False) == runtime.SKIP, "the cap holds for everybody"


@pytest.mark.parametrize(("cap", "policy"), [(1, "priority"), (2, "fcfs")])
def test_rank_counts_for_nothing_with_one_slot_or_first_come_first_served(cap, policy):
    g = fair_gate([request("low", 100_000, 5000, priority=5), LANE], cap=cap, policy=policy)
    scheduled = {"low": g.clip(g.scheduler.running[0], 8192, 8192)}
    high = request("high", 50_000, priority=0)
    g.before_lookup(high, scheduled)
    assert g.after_lookup(high, 0, g.chunk(high, 0, 8192), scheduled, False) == runtime.SKIP


def test_blocks_and_media_that_must_stay_whole():
    aligned = fair_gate(
        [LONG, LANE], need_mamba_block_aligned_split=True, cache_config=SimpleNamespace(block_size=2048)
    )
    assert aligned.clip(LONG, 8192, 8192) == 2048
    g = fair_gate([LONG, LANE])
    g.whole_items = True
    image = SimpleNamespace(**vars(LONG), has_encoder_inputs=True)
    assert g.clip(image, 3000, 8192) == 3000
    assert g.clip(LONG, 3000, 8192) == 512


def test_the_allowance_replaces_the_threshold_on_the_schedulers_own_copy():
    config = SimpleNamespace(long_prefill_token_threshold=1024, policy="fcfs")
    scheduler = SimpleNamespace(scheduler_config=config)
    g = runtime.FairGate(scheduler, runtime.Settings({}))
    assert g.allowance == 1024
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0
    assert config.long_prefill_token_threshold == 1024


@pytest.mark.parametrize(("raw", "value", "warned"), [("", 0, 0), ("256", 256, 0), ("-1", 0, 0), ("half", 0, 1)])
def test_allowance(raw, value, warned):
    settings = runtime.Settings({"DSPARK_MIXED_PREFILL_TOKENS": raw})
    assert (settings.allowance, len(settings.warnings)) == (value, warned)
