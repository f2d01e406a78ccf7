"""What must hold on every release that runs here; prints one JSON line. Run with that release first on PYTHONPATH."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "tests/scheduler")]

import proof  # noqa: E402
import workloads  # noqa: E402
from conftest import make_rig  # noqa: E402


def gate(policy: str, cap: int, allowance: int = 512) -> dict[str, str]:
    return {
        "DSPARK_PREFILL_POLICY": policy,
        "DSPARK_MAX_INFLIGHT_PREFILLS": str(cap),
        "DSPARK_MIXED_PREFILL_TOKENS": str(allowance),
    }


def main() -> None:
    rig = make_rig()
    found: dict[str, Any] = {"version": rig.version, "problems": []}

    def check(title: str, ok: bool) -> None:
        if not ok:
            found["problems"].append(title)

    for cap in (1, 2, 3):
        seen = workloads.cold_lanes().run(rig, gate("strict", cap))
        check(f"strict {cap}: partial {seen.partial}", seen.partial == cap)
        check(f"strict {cap}: {seen.skips} {seen.unfinished}", not seen.skips and not seen.unfinished)
    seen = workloads.live_and_long().run(rig, gate("fair", 2))
    found["short_ttft_ms"], found["live_gap_ms"] = round(seen.ttft("short")), round(seen.gap("live"))
    check(f"fair: {seen.skips} {seen.unfinished}", not seen.skips and not seen.unfinished)
    for policy in ("strict", "fair"):
        with proof.settings(**gate(policy, 1)):
            seen = proof.drive_loads(rig, loads=2, prompts=3, after=40)
        check(f"loads {policy}: {seen.unfinished}", not seen.unfinished)
        check(f"loads {policy}: prompts wait", max(seen.first_token[f"prompt{i}"] for i in range(3)) < 40)
        for seed in range(3000, 3010):
            cap = 1 + seed % 3
            seen = workloads.random_workload(seed).run(rig, gate(policy, cap))
            check(f"seed {seed} {policy}: partial {seen.partial}", seen.partial <= cap + seen.preempted)
            check(f"seed {seed} {policy}: {seen.unfinished}", not seen.unfinished)
            check(f"seed {seed} {policy}: {seen.skips}", policy == "strict" or not seen.skips)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
