"""What the hotfix says in a service's journal: which cap is in force, and what each step did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_BUILT = re.compile(
    r"\[issue27-hotfix\] in-flight prefill cap=(?P<cap>\d+) policy=(?P<policy>\w+) diag=(?P<diag>[01])"
    r" revision=(?P<revision>\d+)(?: allowance=(?P<allowance>\d+))?"
)
_STEP = re.compile(r"\[issue43-step (\d+)\] (\{.*\})\s*$")


def built(lines: Iterable[str]) -> dict[str, Any] | None:
    """The last construction of a scheduler in ``lines``: cap, policy, diag, revision, allowance (tokens or None).

    None where no line tells of one. ``{"off": True}`` where the hotfix said that it is switched off.
    """
    found: dict[str, Any] | None = None
    for line in lines:
        if match := _BUILT.search(line):
            found = {k: v if k == "policy" else int(v) for k, v in match.groupdict().items() if v is not None}
            found.setdefault("allowance", None)
        elif "[issue27-hotfix] off:" in line:
            found = {"off": True}
    return found


def steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The diagnostic records in ``lines``, each with its ``step``; broken lines are left out."""
    found = []
    for line in lines:
        if match := _STEP.search(line):
            try:
                found.append({"step": int(match[1]), **json.loads(match[2])})
            except ValueError:
                continue
    return found


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all steps: how many, most partial prefills, most prefill tokens beside a decode, skipped decodes, holds."""
    return {
        "steps": len(records),
        "max_partial": max((r["partial"] for r in records), default=0),
        "max_mixed_prefill": max((sum(r["prefill"].values()) for r in records if r["decode"]), default=0),
        "decode_skips": sum(len(r["decode_skips"]) for r in records),
        "held": sum(len(r["held"]) for r in records),
    }
