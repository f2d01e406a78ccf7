"""Stock, the original hotfix, strict and fair on the workloads of workloads.py, in modelled time: `make bench-hotfix`.

VENV/bin/python tests/scheduler/bench.py [--seeds FIRST-LAST] [--variants stock,strict/1,fair/2/512,…] [--out NAME]

Prints a table for each kind of workload, writes NAME.json and NAME.svg, and exits 1 where strict or fair exceeded its
cap, left a request unfinished, or (fair) skipped a decode. Seeds 0 to 199 chose the default allowance; the seeds here
are others. `--ablate` leaves out one rule of fair at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "tests/scheduler")]

import proof  # noqa: E402
import workloads  # noqa: E402
from conftest import make_rig  # noqa: E402

SEEDS = "1000-1199"
DEFAULT = "fair/2/480"  # what the serve role sets
VARIANTS = (
    ["stock", "original/1", "original/2", "strict/1", "strict/2", "strict/3"]
    + [f"fair/{cap}/{allowance}" for cap in (1, 2, 3) for allowance in (256, 512, 1024)]
    + [DEFAULT]
)


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


def rig_with_original() -> proof.Rig:
    """The hooked scheduler, with one more policy: the hotfix that others published, made after its description.

    It counts the prefills that vLLM itself tracks (from 0.23 on), loads in flight among them, and breaks at the cap.
    """
    rig = make_rig()
    runtime: Any = rig.runtime  # type: ignore[attr-defined]

    class ReimplementedOriginal(runtime.Gate):  # type: ignore[misc]
        def before_lookup(self, _request: Any, _scheduled: Any) -> int:
            full = len(self.scheduler._inflight_prefills) >= self.settings.cap
            return int(runtime.STOP if full else runtime.ADMIT)

    runtime.GATES["original"] = ReimplementedOriginal
    return rig


def mean(rows: list[proof.Seen], value: Callable[[proof.Seen], float]) -> float:
    return sum(map(value, rows)) / len(rows)


def random_workloads(rig: proof.Rig, env: dict[str, str], seeds: range) -> dict[str, float]:
    """Means over the workloads of ``seeds``, times in seconds, gaps in milliseconds; sums and extremes of counts.

    ``above_cap``: workloads with more partial prefills than the cap and the streams that were preempted and resumed,
    which the cap must not hold.
    """
    rows = [workloads.random_workload(seed).run(rig, env) for seed in seeds]
    cap = int(env.get("DSPARK_MAX_INFLIGHT_PREFILLS", 10**9))
    return {
        "ttft_s": round(mean(rows, proof.Seen.ttft) / 1000, 1),
        "worst_gap_ms": round(mean(rows, proof.Seen.gap)),
        "total_s": round(sum(s.time for s in rows) / 1000),
        "steps": sum(s.steps for s in rows),
        "max_partial": max(s.partial for s in rows),
        "above_cap": sum(s.partial > cap + s.preempted for s in rows),
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
            "decode_skips": len(seen.skips),
            "unfinished": len(seen.unfinished),
        }
    with proof.settings(**env):
        seen = proof.drive_loads(rig, loads=3, prompts=3, after=40)
    found["async_loads"] = {"steps": seen.steps, "unfinished": len(seen.unfinished)}
    return found


def measure(variant: str, seeds: range) -> dict[str, dict[str, float]]:
    """Every workload under one variant, in a process of its own."""
    began, env = time.monotonic(), environ(variant)
    rig = rig_with_original()
    row = {"random": random_workloads(rig, env, seeds), **named_workloads(rig, env)}
    print(f"{variant:12} [{time.monotonic() - began:.0f} s] {json.dumps(row)}", flush=True)
    return row


def broken_promises(variant: str, row: dict[str, dict[str, float]]) -> list[str]:
    """What a variant of ours did that it must never do."""
    if not variant.startswith(("strict", "fair")):
        return []
    counts = ["above_cap", "unfinished"] + ["decode_skips"] * variant.startswith("fair")
    found = [(kind, count, values.get(count, 0)) for kind, values in row.items() for count in counts]
    return [f"{variant}: {kind}: {count}={value}" for kind, count, value in found if value]


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

    def no_slot(self: Any, request: Any, left: int, tokens: int) -> str:
        why = str(full(self, request, left, tokens))
        return "" if why == "slot" else why

    def early(self: Any, request: Any, scheduled: Any) -> int:
        verdict = before(self, request, scheduled)
        left = request.num_tokens - request.num_computed_tokens
        why = full(self, request, left, min(left, self.share - self.used))
        if verdict or not why or self._exempted(request, scheduled):
            return int(verdict)
        self.held[request.request_id] = why
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
        "slots but one for short prompts": ("_full", no_slot),
        "share for short prompts": ("_want", lambda _self: 0),
        "credit carried over steps": ("begin", half),
        "credit limited": ("begin", unlimited),
    }
    setattr(gate, *changes[rule])


RULES = [
    "allowance beside live streams", "room for every stream's tokens", "threshold lifted without streams",
    "skip, not stop, at a held prompt", "guard after the lookup", "slots but one for short prompts",
    "share for short prompts", "credit carried over steps", "credit limited",
]  # fmt: skip


def ablate(seeds: range) -> dict[str, Any]:
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


def overhead(calls: int = 400) -> dict[str, float]:
    """Median CPU time of ``schedule()`` in ms, 256 requests decoding and 300 waiting for a place among them."""
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
    order = list(schedulers)
    for turn in range(calls):  # interleaved, so that a busy machine disturbs all alike, each as often after each other
        for variant in order[turn % len(order) :] + order[: turn % len(order)]:
            r, scheduler = schedulers[variant]
            began = time.thread_time()
            out = scheduler.schedule()
            found[variant].append(time.thread_time() - began)
            scheduler.update_from_output(out, r.output(out, {name: [11] for name in out.num_scheduled_tokens}))
    medians = {variant: statistics.median(times) * 1000 for variant, times in found.items()}
    return {v: round(m, 3) for v, m in medians.items()} | {
        f"{v} ratio": round(m / medians["stock"], 3) for v, m in medians.items()
    }


def show(row: dict[str, Any]) -> None:
    for name, values in row.items():
        print(f"  {name:15} " + " ".join(f"{k}={v}" for k, v in values.items()), flush=True)


def tables(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """One table for each kind of workload, a variant a row."""
    text = []
    for kind in next(iter(rows.values())):
        columns = list(next(iter(rows.values()))[kind])
        text += ["", kind, f"{'':12}" + "".join(f"{c:>14}" for c in columns)]
        text += [f"{v:12}" + "".join(f"{row[kind][c]:>14}" for c in columns) for v, row in rows.items()]
    return "\n".join(text)


def plot(rows: dict[str, dict[str, dict[str, float]]], title: str) -> str:
    """The random workloads as SVG: mean worst gap (ms, logarithmic) against mean time to first token (s)."""
    points = {v: (row["random"]["ttft_s"], row["random"]["worst_gap_ms"]) for v, row in rows.items()}
    width, height, left, top = 640, 400, 60, 30
    most = max(x for x, _ in points.values()) * 1.15
    low, high = (math.log10(f(y for _, y in points.values()) * by) for f, by in ((min, 0.8), (max, 1.25)))
    colours = {"stock": "#777", "original": "#c60", "strict": "#06c", "fair": "#082"}

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / most * width, top + (high - math.log10(y)) / (high - low) * height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{top + height + 50}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{left}" y="18" font-size="13">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>',
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">mean time to first token, s</text>',
        f'<text x="{left}" y="{top + 14}" dx="4">mean worst gap, ms</text>',
    ]
    for x in range(0, int(most) + 1, 10):
        parts.append(f'<text x="{at(x, 10**low)[0]:.0f}" y="{top + height + 16}" text-anchor="middle">{x}</text>')
    for y in (200, 500, 1000, 2000, 5000, 10_000):
        if low < math.log10(y) < high:
            parts.append(f'<text x="{left - 6}" y="{at(0, y)[1] + 4:.0f}" text-anchor="end">{y}</text>')
    for variant, point in points.items():
        x, y = at(*point)
        colour = colours[variant.partition("/")[0]]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if variant == DEFAULT else 3}" fill="{colour}"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{y - 4:.1f}" fill="{colour}">{variant}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", default=SEEDS, help="first and last seed of the random workloads")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-hotfix"))
    parser.add_argument("--ablate", action="store_true")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    seeds = range(first, last + 1)
    if args.ablate:
        args.out.with_suffix(".json").write_text(json.dumps(ablate(seeds), indent=1) + "\n", encoding="utf-8")
        return 0
    variants = args.variants.split(",")
    with ProcessPoolExecutor() as pool:
        rows = dict(zip(variants, pool.map(partial(measure, seeds=seeds), variants), strict=True))
    version = proof.Rig().version
    report = {"vllm": version, "seeds": args.seeds, "variants": rows, "overhead": overhead()}
    print(tables(rows))
    show({"overhead": report["overhead"]})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    title = f"Random workloads, seeds {args.seeds}, scheduler of vLLM {version}, modelled step times"
    args.out.with_suffix(".svg").write_text(plot(rows, title), encoding="utf-8")
    broken = [line for variant, row in rows.items() for line in broken_promises(variant, row)]
    print("\n".join(broken) or f"kept: cap, every request, every stream of fair; {args.out}.json, {args.out}.svg")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
