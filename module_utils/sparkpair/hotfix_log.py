"""What the hotfix says in a service's journal: which cap is in force, and what each step did.

    journalctl -u sparkpair-rank -o cat | python3 module_utils/sparkpair/hotfix_log.py

prints the last cap and a summary of the diagnostic lines as JSON. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

_BUILT = re.compile(
    r"\[issue27-hotfix\] in-flight prefill cap=(?P<cap>\d+) policy=(?P<policy>\w+) diag=(?P<diag>[01])"
    r" revision=(?P<revision>\d+) threshold=(?P<threshold>\d+) budget=(?P<budget>\d+)(?: allowance=(?P<allowance>\d+))?"
)
_STEP = re.compile(r"\[issue43-step (\d+)\] (\{.*\})\s*$")


def built(lines: Iterable[str]) -> dict[str, Any] | None:
    """The last construction of a scheduler in ``lines``: cap, policy, diag, revision, allowance (tokens or None).

    threshold and budget: the engine's own long_prefill_token_threshold (0: none) and max_num_batched_tokens.
    None where no line tells of one, and where the last one said that the hotfix is switched off.
    """
    found: dict[str, Any] | None = None
    for line in lines:
        if match := _BUILT.search(line):
            found = {k: v if k == "policy" else int(v) for k, v in match.groupdict().items() if v is not None}
            found.setdefault("allowance", None)
        elif "[issue27-hotfix] off:" in line:
            found = None
    return found


def steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The diagnostic records in ``lines``, each with its ``step``; broken lines are left out.

    The fields are those of ``StrictGate.report`` in ``patches/dspark_prefill.py``.
    """
    found = []
    for line in lines:
        if match := _STEP.search(line):
            try:
                found.append({"step": int(match[1]), **json.loads(match[2])})
            except ValueError:
                continue
    return found


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all steps: counts, extremes, and how often a request was held or exempt, by reason."""
    return {
        "steps": len(records),
        "max_partial": max((r["partial"] for r in records), default=0),
        "max_mixed_prefill": max((sum(r["prefill"].values()) for r in records if r["decode"]), default=0),
        "decode_skips": sum(len(r["decode_skips"]) for r in records),
        "longest_skip": max((s["run"] for r in records for s in r["decode_skips"].values()), default=0),
        "held": dict(Counter(why for r in records for why in r["held"].values())),
        "oldest_hold": max((r["oldest_hold"] for r in records), default=0),
        "exempt": dict(Counter(why for r in records for why in r["exempt"].values())),
        "overcounted": sum(len(r["overcounted"]) for r in records),
    }


if __name__ == "__main__":
    text = sys.stdin.readlines()
    print(json.dumps({"built": built(text), **summary(steps(text))}, indent=1))
