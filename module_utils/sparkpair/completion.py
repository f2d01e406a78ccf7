"""One streamed chat completion, read as a client would: the only proof that a pair serves.

`/health` and `/v1/models` stay green while a rank is dead, and a stream can carry an error and still end with
HTTP 200 and [DONE] (measured on a two-node vLLM 0.32; see docs/architecture.md).
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class ProbeError(Exception):
    """The API did not give a completion; the text says what it gave."""


@dataclass
class Completion:
    """Text, streamed chunks with text, seconds to the first of them, seconds in all, and why the stream ended."""

    text: str = ""
    chunks: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_stream(lines: Iterable[bytes], started: float) -> Completion:
    """Collect a server-sent event stream. Raises ProbeError on an error chunk, a cut stream, or one without text."""
    done = Completion()
    for raw in lines:
        line = raw.decode("utf-8", errors="replace").strip()
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            break
        try:
            event = json.loads(data)
            choice = (event.get("choices") or [{}])[0]
            text = (choice.get("delta") or {}).get("content") or ""
        except (ValueError, AttributeError, IndexError) as error:
            raise ProbeError(f"the stream holds what is no event: {data[:120]!r}") from error
        if "error" in event:
            raise ProbeError(f"the stream carries an error: {json.dumps(event['error'])[:300]}")
        if text:
            done.first_token_s = done.first_token_s or time.monotonic() - started
            done.text += text
            done.chunks += 1
        done.finish = choice.get("finish_reason") or done.finish
    else:
        raise ProbeError(f"the stream ended after {done.chunks} chunks without [DONE]")
    if not done.text:
        raise ProbeError("the stream ended without any text")
    done.total_s = time.monotonic() - started
    return done


def ask(host: str, port: int, model: str, prompt: str, tokens: int, key: str, timeout: float) -> Completion:
    """Stream one chat completion of at most `tokens` tokens.

    Raises ProbeError when the API cannot be reached within `timeout` seconds, refuses, or streams an error.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    started = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ProbeError(f"HTTP {answer.status}: {answer.read(300).decode('utf-8', errors='replace')}")
        return read_stream(answer, started)
    except (OSError, http.client.HTTPException) as error:
        raise ProbeError(f"no answer within {timeout:.0f} s: {error or type(error).__name__}") from error
    finally:
        connection.close()


GUARDED = ("/v1/models", "/v2/embed", "/inference/v1/generate", "/metrics", "/version", "/tokenize", "/invocations")
"""One path of each family of routes; vLLM's own key guards some of them alone (read in 0.20 to 0.33)."""


def open_without_key(host: str, port: int, timeout: float) -> list[str]:
    """Paths that answer something else than 401 without a key, as "path (HTTP status)".

    Raises ProbeError when the API cannot be reached.
    """
    found = []
    for path in GUARDED:
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"no answer within {timeout:.0f} s: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if status != 401:
            found.append(f"{path} (HTTP {status})")
    return found
