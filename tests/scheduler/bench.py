"""Stock, strict and fair on the workloads of workloads.py, in modelled time: `make bench-hotfix`.

VENV/bin/python tests/scheduler/bench.py [--seeds N] [--variants stock,strict/1,fair/2/512,…] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def without(rule: str, gate: Any) -> None:
    """Take one rule out of the class ``gate`` (FairGate of a fresh runtime)."""
    begin, full, after, before = gate.begin, gate._full, gate.after_lookup, gate.before_lookup

    def unbounded(self: Any) -> Any:
        self.allowance = 10**9
        return begin(self)

    def threshold(self: Any) -> Any:
        if not hasattr(self, "kept"):
            self.kept = self.scheduler.vllm_config.scheduler_config.long_prefill_token_threshold
            self.scheduler.scheduler_config.long_prefill_token_threshold = self.kept
        return begin(self)

    def no_drafts(self: Any) -> Any:
        found = begin(self)
        if len(self.scheduler.running) > len(self.unfinished):
            self.share = self.allowance
        return found

    def stops(self: Any, *args: Any) -> int:
        verdict = after(self, *args)
        self.measured.clear()  # or the next step would skip it before its lookup
        return 2 if verdict else 0

    def no_slot(self: Any, left: int, tokens: int) -> bool:
        return self.used >= self.share or (tokens < left and len(self.partial) >= self.settings.cap)

    def early(self: Any, request: Any, scheduled: Any) -> int:
        verdict = before(self, request, scheduled)
        left = request.num_tokens - request.num_computed_tokens
        if verdict or not full(self, left, min(left, self.share - self.used)) or self._exempted(request, scheduled):
            return int(verdict)
        self.held.append(request.request_id)
        return 1

    def unlimited(self: Any) -> Any:
        self.credit = 10**9
        return begin(self)

    def half(self: Any) -> Any:
        self.credit = 0
        return begin(self)

    changes: dict[str, tuple[str, Any]] = {
        "allowance beside live streams": ("begin", unbounded),
        "room for every stream's tokens": ("begin", no_drafts),
        "threshold lifted without streams": ("begin", threshold),
        "skip, not stop, at a held prompt": ("after_lookup", stops),
        "guard after the lookup": ("before_lookup", early),
        "last slot for short prompts": ("_full", no_slot),
        "share for short prompts": ("_want", lambda _self: 0),
        "credit carried over steps": ("begin", half),
        "credit limited": ("begin", unlimited),
    }
    setattr(gate, *changes[rule])


RULES = [
    "allowance beside live streams", "room for every stream's tokens", "threshold lifted without streams",
    "skip, not stop, at a held prompt", "guard after the lookup", "last slot for short prompts",
    "share for short prompts", "credit carried over steps", "credit limited",
]  # fmt: skip


def ablate(seeds: int) -> dict[str, Any]:
    """The fair policy, cap 2 and allowance 512, whole and without each of its rules."""
    found: dict[str, Any] = {}
    for rule in ["", *RULES]:
        rig = make_rig()
        if rule:
            without(rule, rig.runtime.FairGate)  # type: ignore[attr-defined]
        env = environ("fair/2/512")
        found[rule or "all rules"] = {"random": random_workloads(rig, env, seeds), **named_workloads(rig, env)}
        print(f"without {rule}" if rule else "all rules", flush=True)
        show(found[rule or "all rules"])
    return found


def overhead(calls: int = 300) -> dict[str, float]:
    """Median time of ``schedule()`` in ms, 256 requests decoding and 300 waiting for a place among them."""
    rig = make_rig()
    plain = make_rig(hooks=False)
    found: dict[str, list[float]] = {}
    schedulers = {}
    for variant, r in (("stock", plain), ("off", rig), ("strict/2", rig), ("fair/2/512", rig)):
        env = environ(variant) if variant != "off" else environ("stock")
        with proof.settings(**env):
            scheduler = r.scheduler(seqs=256, budget=8192)
        for i in range(556):
            scheduler.add_request(r.request(f"r{i}", 24, 100_000))
        for _ in range(3):
            out = scheduler.schedule()
            scheduler.update_from_output(out, r.output(out, {name: [11] for name in out.num_scheduled_tokens}))
        schedulers[variant] = (r, scheduler)
        found[variant] = []
    for _ in range(calls):  # interleaved, so that a busy machine disturbs all alike
        for variant, (r, scheduler) in schedulers.items():
            began = time.perf_counter()
            out = scheduler.schedule()
            found[variant].append(time.perf_counter() - began)
            scheduler.update_from_output(out, r.output(out, {name: [11] for name in out.num_scheduled_tokens}))
    medians = {variant: statistics.median(times) * 1000 for variant, times in found.items()}
    return {v: round(m, 3) for v, m in medians.items()} | {
        f"{v} ratio": round(m / medians["stock"], 3) for v, m in medians.items()
    }


def show(row: dict[str, Any]) -> None:
    for name, values in row.items():
        print(f"  {name:15} " + " ".join(f"{k}={v}" for k, v in values.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {"seeds": args.seeds, "variants": {}}
    if args.overhead:
        report["overhead"] = overhead()
        show({"overhead": report["overhead"]})
    if args.ablate:
        report["ablation"] = ablate(args.seeds)
    rig = make_rig()
    report["vllm"] = rig.version
    for variant in () if args.ablate or args.overhead else args.variants.split(","):
        began = time.monotonic()
        env = environ(variant)
        row = {"random": random_workloads(rig, env, args.seeds), **named_workloads(rig, env)}
        report["variants"][variant] = row
        print(f"{variant:12} [{time.monotonic() - began:.0f} s]", flush=True)
        show(row)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
