"""Stock, strict and fair on the workloads of workloads.py, in modelled time: `make bench-hotfix`.

VENV/bin/python tests/scheduler/bench.py [--seeds N] [--variants stock,strict/1,fair/2/512,…] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "tests/scheduler")]

import proof  # noqa: E402
import workloads  # noqa: E402
from conftest import make_rig  # noqa: E402

VARIANTS = ["stock", "strict/1", "strict/2", "strict/3"] + [
    f"fair/{cap}/{allowance}" for cap in (1, 2, 3) for allowance in (256, 512, 1024)
]


def environ(variant: str) -> dict[str, str]:
    """Settings of the gate for a name such as ``fair/2/512`` (policy, cap, allowance)."""
    policy, _, rest = variant.partition("/")
    if policy == "stock":
        return {"DSPARK_PREFILL_HOTFIX_OFF": "1"}
    cap, _, allowance = rest.partition("/")
    return {
        "DSPARK_PREFILL_POLICY": policy,
        "DSPARK_MAX_INFLIGHT_PREFILLS": cap,
        "DSPARK_MIXED_PREFILL_TOKENS": allowance,
    }


def mean(rows: list[proof.Seen], value: Callable[[proof.Seen], float]) -> float:
    return sum(map(value, rows)) / len(rows)


def random_workloads(rig: proof.Rig, env: dict[str, str], seeds: int) -> dict[str, float]:
    """Means over ``seeds`` random workloads; times in seconds, gaps in milliseconds."""
    rows = [workloads.random_workload(seed).run(rig, env) for seed in range(seeds)]
    return {
        "ttft_s": round(mean(rows, proof.Seen.ttft) / 1000, 1),
        "worst_gap_ms": round(mean(rows, proof.Seen.gap)),
        "total_s": round(sum(s.time for s in rows) / 1000),
        "steps": sum(s.steps for s in rows),
        "max_partial": max(s.partial for s in rows),
        "decode_skips": sum(len(s.skips) for s in rows),
        "preempted": sum(s.preempted for s in rows),
        "unfinished": sum(len(s.unfinished) for s in rows),
    }


def named_workloads(rig: proof.Rig, env: dict[str, str]) -> dict[str, dict[str, float]]:
    """The three workloads with a story; mean time to first token in seconds by kind of request."""
    found: dict[str, dict[str, float]] = {}
    for workload, live in (
        (workloads.cold_lanes, "lane"),
        (workloads.live_and_long, "live"),
        (workloads.warm_followups, "live"),
    ):
        seen = workload().run(rig, env)
        kinds = sorted({name.rstrip("0123456789") for name in seen.arrived} - {"first"})
        found[workload.__name__] = {
            "live_gap_ms": round(seen.gap(live)),
            **{f"{kind}_ttft_s": round(seen.ttft(kind) / 1000, 2) for kind in kinds},
            "total_s": round(seen.time / 1000, 1),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rig = make_rig()
    report: dict[str, Any] = {"vllm": rig.version, "seeds": args.seeds, "variants": {}}
    for variant in args.variants.split(","):
        began = time.monotonic()
        env = environ(variant)
        row = {"random": random_workloads(rig, env, args.seeds), **named_workloads(rig, env)}
        report["variants"][variant] = row
        print(f"{variant:12} [{time.monotonic() - began:.0f} s]", flush=True)
        for name, values in row.items():
            print(f"  {name:15} " + " ".join(f"{k}={v}" for k, v in values.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
