"""The known-bad states: every entry has facts that meet it and near ones that do not; the schema refuses the rest."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import yaml
from ansible.module_utils.sparkpair.known_bad import (
    FACTS,
    KnownBadError,
    in_range,
    judge,
    log_patterns,
    parse,
    split,
    values_at,
    version,
)
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

SHIPPED = yaml.safe_load((ROOT / "known_bad.yml").read_text())
FIXTURE = yaml.safe_load((ROOT / "tests/fixtures/known_bad.yml").read_text())
ENTRIES = parse(SHIPPED)
WHOLE = {
    "id": "mine",
    "summary": "a state of mine",
    "when": {"release": {"equals": "7.5.0"}},
    "severity": "fatal",
    "blocks": ["preflight"],
    "remedy": "mend it",
    "source": "me",
}


def overlay(change: dict[str, Any]) -> dict[str, Any]:
    """Healthy facts with a change; mappings are merged, everything else is replaced."""
    facts = dict(FIXTURE["healthy"])
    for key, value in change.items():
        facts[key] = {**facts[key], **value} if isinstance(value, dict) else value
    return facts


def ids(facts: dict[str, Any]) -> list[str]:
    return [hit.entry.id for hit in judge(ENTRIES, facts)]


def test_there_are_at_least_30_entries_and_every_one_has_both_fixtures():
    assert len(ENTRIES) >= 30
    assert {entry.id for entry in ENTRIES} == set(FIXTURE["cases"])
    assert all({"bad", "good"} <= set(case) for case in FIXTURE["cases"].values())


@pytest.mark.parametrize("name", FIXTURE["cases"])
def test_facts_that_meet_an_entry(name):
    case = FIXTURE["cases"][name]
    facts = overlay(case["bad"])
    for log in ("system_log", "rank_log"):
        if log in case["bad"] and "repeat" in case:
            facts[log] = facts[log] * case["repeat"]
    assert name in ids(facts)


@pytest.mark.parametrize("name", FIXTURE["cases"])
def test_near_facts_that_do_not(name):
    assert name not in ids(overlay(FIXTURE["cases"][name]["good"]))


def test_a_healthy_node_meets_nothing_despite_its_false_alarms():
    """27 W, GDR 0 and GPU Direct RDMA Disabled, a lone 0x51, shm_broadcast while loading."""
    assert ids(FIXTURE["healthy"]) == []


@pytest.mark.parametrize(
    "line",
    [
        "mlx5_pcie_event:326:(pid 0): Detected insufficient power on the PCIe slot (27W).",
        "NCCL INFO Connected all rings, use ring PXN 0 GDR 0",
        "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 rocep1s0f0",
        "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal",
        "No available shared memory broadcast block found in 60 seconds.",
    ],
)
def test_false_alarms_alone_are_nothing(line):
    assert ids(overlay({"system_log": [line] * 9, "rank_log": [line] * 9})) == []


def test_a_node_of_which_nothing_is_known_is_not_bad():
    assert judge(ENTRIES, {}) == []


def test_every_entry_says_what_mends_it_and_where_it_is_from():
    for entry in ENTRIES:
        assert len(entry.remedy) > 15 and entry.source, entry.id


def test_fatal_hits_stop_their_stages_and_warnings_stop_none():
    hits = [hit.as_dict() for hit in judge(ENTRIES, overlay({"nics": [{"width": 2}], "snap_docker": 1}))]
    faults, warnings = split("spark-b", hits, "accept")
    assert len(faults) == 1 and faults[0].startswith("spark-b: found a ConnectX-7") and "fwupdmgr" in faults[0]
    assert len(warnings) == 1 and "snap-docker" in warnings[0]
    assert split("spark-b", hits, "preflight")[0] == []


def test_an_inventory_adds_replaces_and_accepts():
    mine = {**WHOLE, "id": "snap-docker", "when": {"snap_docker": {"equals": 0}}}
    assert [hit.entry.id for hit in judge(parse([*SHIPPED, mine, WHOLE]), FIXTURE["healthy"])] == [
        "snap-docker",
        "mine",
    ]
    assert judge(parse([*SHIPPED, WHOLE], accepted=["mine"]), FIXTURE["healthy"]) == []
    with pytest.raises(KnownBadError, match="'mien'"):
        parse([WHOLE], accepted=["mien"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "Mine"}, "lower-case"),
        ({"summary": " "}, "summary"),
        ({"severity": "bad"}, "severity"),
        ({"blocks": ["deploy"]}, "blocks"),
        ({"blocks": []}, "stages for fatal"),
        ({"severity": "warning"}, "stages for fatal"),
        ({"when": {}}, "no condition"),
        ({"when": {"kernal": {"equals": 1}}}, "unknown fact"),
        ({"when": {"kernel": {}}}, "one operator"),
        ({"when": {"kernel": {"equals": 1, "above": 0}}}, "one operator"),
        ({"when": {"kernel": {"equals": 1, "count": 2}}}, "beside matches"),
        ({"when": {"kernel": {"matches": "("}}}, "regular expression"),
        ({"when": {"kernel": {"version": "7.0"}}}, "constraints"),
        ({"when": {"kernel": {"version": ">=new"}}}, "constraints"),
        ({"when": {"meminfo.CmaTotal": {"below": "few"}}}, "a number"),
        ({"when": {"kernel": {"unset": False}}}, "expected true"),
        ({"extra": 1}, "extra"),
    ],
)
def test_entries_that_are_refused(change, words):
    with pytest.raises(KnownBadError, match=words):
        parse([{**WHOLE, **change}])


@pytest.mark.parametrize("missing", list(WHOLE))
def test_no_key_may_be_missing(missing):
    with pytest.raises(KnownBadError, match=missing):
        parse([{key: value for key, value in WHOLE.items() if key != missing}])


@pytest.mark.parametrize(
    ("text", "constraints", "holds"),
    [
        ("7.0.0-1019-nvidia-64k", ">=7.0.0-1019 <7.0.0-1020", True),
        ("7.0.0-1020-nvidia", ">=7.0.0-1019 <7.0.0-1020", False),
        ("6.17.0-1018-nvidia", ">=7.0.0", False),
        ("2.28.9-1+cuda13.0", "==2.28.9", False),
        ("2.28.9", "==2.28.9", True),
        ("unknown", "<9", False),
    ],
)
def test_versions_compare_by_number(text, constraints, holds):
    assert in_range(text, constraints) is holds


def test_only_lines_that_matter_are_asked_for():
    patterns = log_patterns(ENTRIES)
    assert any("Application startup complete" in pattern for pattern in patterns["rank_log"])
    assert patterns["system_log"] and not set(patterns["system_log"]) & set(patterns["rank_log"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=3))
def test_no_entry_makes_the_schema_raise_anything_else(entries):
    with contextlib.suppress(KnownBadError):
        parse(entries)


@given(
    st.fixed_dictionaries({}, optional={key: st.sampled_from([WHOLE[key], None, 7, "x", [], {}]) for key in WHOLE}),
    st.dictionaries(
        st.sampled_from([*FACTS, "x.y"]),
        st.dictionaries(
            st.sampled_from(["equals", "below", "above", "version", "matches", "lacks", "unset", "count", "after"]),
            JSON,
            max_size=2,
        ),
        max_size=2,
    ),
    st.dictionaries(st.sampled_from(list(FACTS)), JSON, max_size=4),
)
def test_an_entry_is_refused_or_judges_any_facts(change, when, facts):
    try:
        entries = parse([{**WHOLE, **change, "when": when}])
    except KnownBadError:
        return
    judge(entries, facts)


@given(st.dictionaries(st.sampled_from(list(FACTS)), JSON, max_size=6))
def test_no_facts_make_the_shipped_entries_raise(facts):
    for hit in judge(ENTRIES, facts):
        assert hit.evidence


@given(JSON, st.text(max_size=12))
def test_any_path_into_anything(facts, path):
    values_at(facts, path)
    version(path)
