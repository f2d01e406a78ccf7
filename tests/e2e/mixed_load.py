"""Live streams, long prompts and short ones on one OpenAI-compatible endpoint; prints what they saw as JSON.

    python3 - PORT MODEL SEED LONG < mixed_load.py

Two streams of 400 tokens; four prompts of LONG tokens from second 1 on; six prompts of 64 tokens, one a second from
second 2 on. Standard library only. Prompts are token ids drawn from SEED, so that none is cached from a run before.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import sys
import threading
import time

LONG = int(sys.argv[4])
LANES = (
    [("live", 16, 0.0, 400)] * 2
    + [("long", LONG, 1.0 + i / 10, 32) for i in range(4)]
    + [("short", 64, 2.0 + i, 16) for i in range(6)]
)
"""Kind, tokens of the prompt, seconds until it is sent, tokens that are asked for."""


def lane(port: int, model: str, kind: str, prompt: list[int], delay: float, tokens: int, found: list[dict]) -> None:
    """Send one request and note when each of its chunks arrived."""
    time.sleep(delay)
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, times = time.perf_counter(), []
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            if b'"error"' in line:
                raise RuntimeError(line.decode())
            times.append(time.perf_counter())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    found.append({"kind": kind, "ttft": times[0] - began, "gaps": gaps, "tokens": len(prompt) + tokens})


def main() -> None:
    port, model, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    r, found, began = random.Random(seed), [], time.perf_counter()
    threads = [
        threading.Thread(target=lane, args=(port, model, kind, [r.randrange(3, 250) for _ in range(n)], *rest, found))
        for kind, n, *rest in LANES
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    assert len(found) == len(LANES), f"{len(LANES) - len(found)} requests failed"
    gaps = sorted(gap for f in found if f["kind"] == "live" for gap in f["gaps"])
    ttft = {kind: [f["ttft"] for f in found if f["kind"] == kind] for kind in ("short", "long")}
    seen = {
        "itl_p50_s": gaps[len(gaps) // 2],
        "itl_p95_s": gaps[int(0.95 * len(gaps))],
        "itl_worst_s": gaps[-1],
        "short_ttft_s": sum(ttft["short"]) / len(ttft["short"]),
        "short_ttft_worst_s": max(ttft["short"]),
        "long_ttft_s": sum(ttft["long"]) / len(ttft["long"]),
        "tokens_per_s": sum(f["tokens"] for f in found) / wall,
    }
    print(json.dumps({name: round(value, 3) for name, value in seen.items()}))


if __name__ == "__main__":
    main()
