"""vLLM's own scheduler tests with the hooks: switched off they change nothing, switched on only what is named here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("upstream.py")
TIMEOUT = 600

# Each asserts what the policy is there to change; by name of the test, without the file.
HELD = {
    "test_schedule_concurrent_partial_requests[False]": "three partial prefills at once, the cap is below",
    "test_schedule_concurrent_partial_requests[True]": "the same with cached prefixes",
}
INTENDED = {
    "off": {},
    "strict/1": {
        **HELD,
        "test_long_prefill_threshold_applies_with_other_requests": "a short prompt joins the step of a long one",
        "test_long_prefill_threshold_floored_by_fair_share": "the same with the adaptive threshold",
        "test_spec_decode_padding_skipped_with_prefill_in_batch": "a cached prompt joins the step of a long one",
    },
    "fair/2": {
        **HELD,
        "test_long_prefill_threshold_applies_with_other_requests": "the threshold cuts a prefill that is alone",
        "test_long_prefill_threshold_floored_by_fair_share": "the same with the adaptive threshold",
        "test_schedule_concurrent_batches[False-None]": "512 tokens of prefill beside a stream, the allowance is 480",
        "test_schedule_concurrent_batches[True-5]": "the same with cached prefixes",
    },
}


@pytest.fixture(scope="module")
def outcomes():
    """Outcome by test, by variant. Without the hooks in a process of its own, at the same time."""
    # Fills the cache; two at once would both.
    subprocess.run([sys.executable, str(SCRIPT)], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
    runs = [
        subprocess.Popen([sys.executable, str(SCRIPT), *variants], stdout=subprocess.PIPE, text=True)
        for variants in (["stock"], list(INTENDED))
    ]
    found: dict[str, dict[str, str]] = {}
    try:
        for done in runs:
            found |= json.loads(done.communicate(timeout=TIMEOUT)[0].splitlines()[-1])
    finally:
        for done in runs:
            done.kill()
    return found


def test_enough_of_them_run_here(outcomes):
    """The others need the configuration of a model from a hub."""
    assert sum(outcome == "passed" for outcome in outcomes["stock"].values()) >= 300


@pytest.mark.parametrize("variant", INTENDED)
def test_nothing_differs_from_stock_but_what_is_intended(outcomes, variant):
    stock, ours = outcomes["stock"], outcomes[variant]
    assert set(ours) == set(stock)
    differ = {name.partition("::")[2]: ours[name] for name in stock if stock[name] != ours[name]}
    assert differ == dict.fromkeys(INTENDED[variant], "failed")
