"""The policies on the lab's real two-node serve, by turns on the same pair: `make bench-serve`, on an idle machine.

Each variant restarts the pair through the inventory's variables and plays `mixed_load.py` on the head. Prints the
medians and their ratios to stock, writes reports/bench-serve.json, and exits 1 where JUDGED misses a target.
KEEP_LAB=1 uses the lab that runs, where site.yml has passed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from conftest import ROOT, lab, play

ROUNDS = 3
RUNS = 2
"""Of each variant in each round: what else the machine does then falls on all variants alike."""
LAB = {
    name: value
    for file in ("profiles/tiny.yml", "inventory/lab/group_vars/sparks.yml")
    for name, value in yaml.safe_load((ROOT / file).read_text(encoding="utf-8")).items()
}
OPTIONS = {"max-num-batched-tokens": 4096, "enable-prefix-caching": False}
THRESHOLD = {"long-prefill-token-threshold": 1024}
# What the inventory says, and further options: strict bounds what runs beside a stream by vLLM's threshold alone.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stock": ({"serve_environment": {"DSPARK_PREFILL_HOTFIX_OFF": 1}}, {}),
    "stock, threshold 1024": ({"serve_environment": {"DSPARK_PREFILL_HOTFIX_OFF": 1}}, THRESHOLD),
    "strict, cap 1, threshold 1024": (
        {"serve_prefill_policy": "strict", "serve_max_inflight_prefills": 1},
        THRESHOLD,
    ),
    "fair": ({}, {}),
    "fair, allowance 640": ({"serve_mixed_prefill_tokens": 640}, {}),
    "fair, allowance 1024": ({"serve_mixed_prefill_tokens": 1024}, {}),
}
JUDGED = "fair"
TARGETS = {"itl_worst_s": 0.35, "short_ttft_s": 0.2, "tokens_per_s": 0.95}
"""Of stock: the first two at most, the last at least."""


def ssh(command: str, stdin: str = "") -> str:
    """Output of a shell command on the head."""
    done = subprocess.run(
        [sys.executable, "lab/lab.py", "ssh", "spark-a", command],
        input=stdin, capture_output=True, text=True, cwd=ROOT, check=True, timeout=600,
    )  # fmt: skip
    return done.stdout


def measure(name: str, folder: Path, seeds: range, long: int) -> list[dict[str, float]]:
    """Restart the pair as variant ``name`` and play the load once for each seed."""
    settings, options = VARIANTS[name]
    variables = {
        **settings,
        "serve_engine_args": {**LAB["serve_engine_args"], **OPTIONS, **options},
        "serve_environment": {**LAB["serve_environment"], **settings.get("serve_environment", {})},
        # No request but ours, and no restart where the machine is busy.
        "serve_canary_interval": 600,
        "serve_wedge_timeout": 120,
    }
    file = folder / "bench-serve-vars.json"
    file.write_text(json.dumps(variables), encoding="ascii")
    play("playbooks/serve.yml", "-e", f"@{file}")
    client = (ROOT / "tests/e2e/mixed_load.py").read_text(encoding="utf-8")
    runs = [json.loads(ssh(f"python3 - 8000 tiny {seed} {long}", client)) for seed in seeds]
    for run in runs:
        print(f"{name}: {run}", flush=True)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--variants", default=";".join(VARIANTS))
    parser.add_argument("--long", type=int, default=24_000, help="tokens of a long prompt")
    args = parser.parse_args()
    reports = ROOT / "reports"
    reports.mkdir(exist_ok=True)
    keep = os.environ.get("KEEP_LAB")
    if not keep:
        lab("down")
        lab("up")
        play("site.yml")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants.split(";")}
    try:
        for number in range(ROUNDS):
            for name in found:
                found[name] += measure(name, reports, range(number * RUNS, (number + 1) * RUNS), args.long)
    finally:
        if not keep:
            lab("down")
    medians = {v: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for v, runs in found.items()}
    ratios = {v: {k: row[k] / medians["stock"][k] for k in TARGETS} for v, row in medians.items()}
    columns = list(medians["stock"])
    print("\n" + " " * 32 + "".join(f"{c:>19}" for c in columns))
    for name, row in medians.items():
        print(f"{name:32}" + "".join(f"{row[c]:>19.3f}" for c in columns))
    for name, ratio in ratios.items():
        print(f"{name:32}" + "  ".join(f"{k} {v:.2f} of stock" for k, v in ratio.items()))
    report = {"runs": found, "medians": medians, "ratios": ratios, "targets": TARGETS}
    (reports / "bench-serve.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    missed = [k for k, bound in TARGETS.items() if (ratios[JUDGED][k] < bound) == (k == "tokens_per_s")]
    print(f"{JUDGED} misses: {', '.join(missed)}" if missed else f"{JUDGED} reaches every target")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
