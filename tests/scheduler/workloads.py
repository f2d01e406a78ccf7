"""The workloads of the bench and of the fuzz, and the clock that gives their steps a length in milliseconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import proof


def gb10(prefill: int, decode: int) -> float:
    """Modelled step time in ms: 60 for decodes alone, and 60 + 0.53 a token more with prefill beside them.

    Fitted to a public table of decode rates against prefill chunk sizes on two DGX Sparks. Linear on purpose: it says
    what a policy does to step lengths, not how fast a machine is.
    """
    return 60.0 + ((60.0 + 0.53 * prefill) if prefill else 0.0)


@dataclass(frozen=True)
class Workload:
    """Settings of the scheduler, and arrivals: (ms, name, prompt tokens or ids, output tokens, priority)."""

    settings: dict[str, Any]
    arrivals: list[tuple[float, str, int | list[int], int, int]]
    seed: int = 0

    def run(self, rig: proof.Rig, environ: dict[str, str], **changed: Any) -> proof.Seen:
        """Play it under the gate settings ``environ``; ``changed`` overrides settings of the scheduler."""
        settings = {**self.settings, **changed}
        with proof.settings(**environ):
            scheduler = rig.scheduler(**settings)
        caching = settings.get("caching", False)
        requests = [
            (
                when,
                rig.request(
                    name,
                    [10 + i] * prompt if isinstance(prompt, int) else prompt,
                    out,
                    priority=priority,
                    arrival=1.0 + when,
                    caching=caching,
                ),
            )
            for i, (when, name, prompt, out, priority) in enumerate(self.arrivals)
        ]
        return proof.drive(
            rig, scheduler, requests, asynchronous=settings.get("asynchronous", False), seed=self.seed, clock=gb10
        )


def cold_lanes(threshold: int = 1024) -> Workload:
    """Six equal prompts of 32K tokens at once."""
    return Workload(
        {"asynchronous": True, "threshold": threshold}, [(0.0, f"lane{i}", 32768, 256, 0) for i in range(6)]
    )


def live_and_long(threshold: int = 1024) -> Workload:
    """Four live streams, two prompts of 100K tokens, and a prompt of 400 every 1.5 s. ``seqs`` leaves room for all."""
    work: list[tuple[float, str, int | list[int], int, int]] = [(0.0, f"live{i}", 300, 400, 0) for i in range(4)]
    work += [(500.0 + 1000 * i, f"long{i}", 100_000, 32, 0) for i in range(2)]
    work += [(1000.0 + 1500 * i, f"short{i}", 400, 16, 0) for i in range(30)]
    return Workload({"threshold": threshold, "seqs": 64}, work)


def warm_followups(threshold: int = 1024) -> Workload:
    """Two live streams, a cold prompt of 100K tokens, and follow-ups of 24 900 tokens of which 24 000 are cached."""
    r = random.Random(7)
    base = [r.randrange(3, 30000) for _ in range(24_000)]
    work: list[tuple[float, str, int | list[int], int, int]] = [(0.0, "first", base + [1] * 16, 2, 0)]
    work += [(20_000.0, f"live{i}", 300, 400, 0) for i in range(2)]
    work.append((22_000.0, "cold", [r.randrange(3, 30000) for _ in range(100_000)], 16, 0))
    work += [
        (24_000.0 + 4000 * i, f"warm{i}", base + [r.randrange(3, 30000) for _ in range(900)], 16, 0) for i in range(8)
    ]
    return Workload({"threshold": threshold, "seqs": 64, "caching": True}, work)


def random_workload(seed: int) -> Workload:
    """4 to 40 requests of 5 to 40 000 tokens over up to a minute; budget, threshold, KV size and more from ``seed``."""
    r = random.Random(seed)
    budget = r.choice([512, 2048, 8192])
    threshold = min(r.choice([0, 0, 128, 512, 1024]), budget)
    n, seqs, tight = r.randint(4, 40), r.choice([8, 16, 64]), r.random() < 0.35
    arrivals: list[tuple[float, str, int | list[int], int, int]] = []
    longest = 0
    for i in range(n):
        prompt = r.choice([r.randint(5, 60), r.randint(100, 900), r.randint(2000, 9000), r.randint(15000, 40000)])
        out = r.choice([1, 2, 8, 40, 150])
        longest = max(longest, prompt + out)
        arrivals.append((float(r.choice([0, r.uniform(0, 60000)])), f"r{i}", prompt, out, r.randint(0, 3)))
    need = -(-(longest + 64) // proof.BLOCK) + 8
    blocks = int(need * r.uniform(1.1, 2.5)) + 4 if tight else 60000
    settings = {
        "budget": budget, "threshold": threshold, "seqs": seqs, "blocks": blocks,
        "policy": r.choice(["fcfs", "fcfs", "priority"]), "caching": r.random() < 0.3,
        "asynchronous": r.random() < 0.5,
    }  # fmt: skip
    settings["drafts"] = r.choice([0, 0, 3])
    return Workload(settings, arrivals, seed)
