"""Questions to the API on this node. They block, so the agent asks them from threads.

`/health` stays 200 while a rank is dead (measured on a two-node vLLM 0.32), so only a completion counts as an answer.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparkpair_rank.completion import answer_to, bearer

Answer = Literal["ok", "refused", "late", "broken"]
METRIC = re.compile(r"^vllm:(\w+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
IN_FLIGHT = re.compile(r'HTTP 503 .*"in_flight": (\d+)')
"""What the guard answers while it drains; vLLM's own number lags by a step."""
BUSY = ("num_requests_running", "num_requests_waiting")
PROGRESS = (
    "generation_tokens_total",
    "prompt_tokens_total",
    "kv_cache_usage_perc",
    "iteration_tokens_total_count",
    "num_preemptions_total",
    "request_success_total",
)
"""Metrics that move when the engine takes a step: in a long prefill only the KV cache's use does."""
METRICS_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class Api:
    """Where the API listens, what model it serves, and the key that it wants (empty for none)."""

    host: str
    port: int
    model: str
    key: str = ""
    warmup_tokens: int = 2048
    tools: bool = False


def ask(api: Api, method: str, path: str, body: Mapping[str, Any] | None, within: float) -> tuple[Answer, str]:
    """One request, ended after `within` seconds also when bytes drip. Returns how it went, and the body or error."""
    headers = {"Content-Type": "application/json", **bearer(api.key)}
    text_sent = json.dumps(body) if body is not None else None
    try:
        with answer_to(api.host, api.port, method, path, text_sent, headers, within) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except TimeoutError as error:
        return "late", str(error)
    except (ConnectionRefusedError, ConnectionResetError) as error:
        return "refused", f"{path}: nothing listens on {api.host}:{api.port}: {error or type(error).__name__}"
    except (OSError, http.client.HTTPException) as error:
        return "broken", f"{path}: {error or type(error).__name__}"
    return ("ok", text) if answer.status == 200 else ("broken", f"{path}: HTTP {answer.status} {text[:200]}")


def complete(api: Api, prompt: str | list[int], tokens: int, within: float) -> tuple[Answer, str]:
    """One completion of `tokens` tokens."""
    body = {"model": api.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer, text = ask(api, "POST", "/v1/completions", body, within)
    if answer != "ok":
        return answer, text
    try:
        json.loads(text)["choices"][0]["text"]
    except (ValueError, LookupError, TypeError):
        return "broken", f"/v1/completions: found no completion in {text[:200]!r}"
    return "ok", ""


def probe(api: Api, kind: str, within: float) -> tuple[Answer, str]:
    """ready and canary: one token. warmup: a decode, a long prefill, and a tool call where a parser is configured."""
    if kind != "warmup":
        return complete(api, "hi", 1, within)
    answer, text = complete(api, "Count to ten.", 16, within)
    if answer != "ok":
        return answer, text
    if api.warmup_tokens:
        answer, text = ask(api, "GET", "/v1/models", None, within)
        if answer != "ok":
            return answer, text
        try:
            most = int(json.loads(text)["data"][0]["max_model_len"])
        except (ValueError, LookupError, TypeError):
            most = api.warmup_tokens
        length = max(1, min(api.warmup_tokens, most - 16))
        # Small token numbers exist in every vocabulary; varied ones fill more than one block of the prefix cache.
        answer, text = complete(api, [10 + i * 7 % 89 for i in range(length)], 1, within)
        if answer != "ok":
            return answer, text
    if api.tools:
        tool = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
        messages = [{"role": "user", "content": "Call noop."}]
        body = {"model": api.model, "messages": messages, "tools": [tool], "max_tokens": 8}
        answer, text = ask(api, "POST", "/v1/chat/completions", body, within)
    return answer, text


def read_metrics(api: Api) -> tuple[int, str | None]:
    """Requests running or waiting, and a text that changes when work advances (None without an answer)."""
    answer, text = ask(api, "GET", "/metrics", None, METRICS_TIMEOUT_S)
    if match := IN_FLIGHT.search(text) if answer == "broken" else None:
        return int(match[1]), match[0]
    return parse_metrics(text) if answer == "ok" else (0, None)


def parse_metrics(text: str) -> tuple[int, str]:
    """As `read_metrics`, from Prometheus text."""
    found = METRIC.findall(text)
    busy = sum(float(value) for name, value in found if name in BUSY)
    return int(busy), " ".join(f"{name}={value}" for name, value in found if name in PROGRESS)
