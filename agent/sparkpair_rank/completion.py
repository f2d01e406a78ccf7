"""One streamed chat completion, read as a client would: the only proof that a pair serves.

`/health` and `/v1/models` stay green while a rank is dead, and a stream can carry an error and still end with
HTTP 200 and [DONE] (measured on a two-node vLLM 0.32; see docs/architecture.md).

    python3 completion.py [MODEL]     # on the head: prints the text as it comes

Standard library only.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

PORT = 8000
"""Where the API listens on the head, unless the inventory says otherwise."""


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


def read_stream(lines: Iterable[bytes], started: float, show: Callable[[str], object] | None = None) -> Completion:
    """Collect a server-sent event stream, and show its text as it comes.

    Raises ProbeError on an error chunk, a cut stream, or one without text.
    """
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
            text = "" + ((choice.get("delta") or {}).get("content") or "")
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise ProbeError(f"the stream holds what is no event: {data[:120]!r}") from error
        if "error" in event:
            raise ProbeError(f"the stream carries an error: {json.dumps(event['error'])[:300]}")
        if text:
            done.first_token_s = done.first_token_s or time.monotonic() - started
            done.text += text
            done.chunks += 1
            if show:
                show(text)
        done.finish = choice.get("finish_reason") or done.finish
    else:
        raise ProbeError(f"the stream ended after {done.chunks} chunks without [DONE]")
    if not done.text:
        raise ProbeError("the stream ended without any text")
    done.total_s = time.monotonic() - started
    return done


def ask(
    host: str,
    port: int,
    model: str,
    prompt: str,
    tokens: int,
    key: str,
    timeout: float,
    show: Callable[[str], object] | None = None,
) -> Completion:
    """Stream one chat completion of at most `tokens` tokens, all of it within `timeout` seconds.

    Raises ProbeError when the API cannot be reached, refuses, streams an error, or is late.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", **bearer(key)}
    started = time.monotonic()
    with named(), answer_to(host, port, "POST", "/v1/chat/completions", json.dumps(body), headers, timeout) as answer:
        if answer.status != 200:
            raise ProbeError(f"HTTP {answer.status}: {answer.read(300).decode('utf-8', errors='replace')}")
        return read_stream(answer, started, show)


@contextmanager
def answer_to(
    host: str, port: int, method: str, path: str, body: str | None, headers: Mapping[str, str], within: float
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, which must also be read within `within` seconds: bytes that drip do not prolong it.

    Raises TimeoutError when the time is over, whatever the reader made of the cut; else OSError or HTTPException.
    """
    connection = http.client.HTTPConnection(host, port, timeout=within)
    over = threading.Event()

    def end() -> None:
        over.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    late = f"no answer to {path} within {within:.0f} s"
    timer = threading.Timer(within, end)
    try:
        connection.connect()
        sock = connection.sock
        timer.start()
        connection.request(method, path, body, dict(headers))
        yield connection.getresponse()
        # To a reader without a length the cut looks like an end.
        if over.is_set():
            raise TimeoutError(late)
    except Exception as error:
        if over.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(late) from error
        # Numbers that no server sends, such as a length below 0, are these to http.client.
        if isinstance(error, ValueError | OverflowError):
            raise http.client.HTTPException(str(error)) from error
        raise
    finally:
        timer.cancel()
        connection.close()


@contextmanager
def named() -> Iterator[None]:
    """Errors of the connection as ProbeError."""
    try:
        yield
    except TimeoutError as error:
        raise ProbeError(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise ProbeError(f"no answer: {error or type(error).__name__}") from error


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


GUARDED = ("/v1/models", "/v2/embed", "/inference/v1/generate", "/metrics", "/version", "/tokenize", "/invocations")
"""One path of each family of routes; vLLM's own key guards some of them alone (read in 0.20 to 0.33)."""
ANSWERED = ("/v1/models", "/metrics", "/version")
"""Those of them that vLLM answers with 200 when they are asked for with a key by GET, on the node itself."""
CLOSED = tuple(path for path in GUARDED if not path.startswith(("/v1/", "/v2/")))
"""Those of them that a network may not ask for, with a key or without."""


def guard_faults(host: str, port: int, keys: list[str], timeout: float) -> list[str]:
    """What is wrong with who may ask for what, as the API is seen from this node's own loopback.

    Raises ProbeError when the API cannot be reached.
    """
    without = {path: status for path in GUARDED if (status := _status(host, port, path, "", timeout)) != 401}
    faults = [f"{path} without a key: HTTP {status}, expected 401" for path, status in without.items()]
    for number, key in enumerate(keys, 1):
        for path in ANSWERED if number == 1 else ANSWERED[:1]:
            if (status := _status(host, port, path, key, timeout)) != 200:
                faults.append(f"{path} with key {number}: HTTP {status}, expected 200")
    return faults


def network_faults(host: str, port: int, timeout: float) -> list[str]:
    """What another node gets from the API although it is closed to a network. Raises ProbeError."""
    faults = []
    for path in (*CLOSED, "/v1/models"):
        found, wanted = _status(host, port, path, "", timeout), 403 if path in CLOSED else 401
        if found != wanted:
            faults.append(f"{path} from here: HTTP {found}, expected {wanted}")
    return faults


def _status(host: str, port: int, path: str, key: str, timeout: float) -> int:
    with named(), answer_to(host, port, "GET", path, None, bearer(key), timeout) as answer:
        return answer.status


def main(model: str = "tiny") -> int:
    """Print one stream of the API on this node; returns 1 when no text came."""
    try:
        done = ask("127.0.0.1", PORT, model, "Say hello.", 48, "", 120, lambda text: print(text, end="", flush=True))
    except ProbeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\n[{done.chunks} chunks; the first after {done.first_token_s:.2f} s, the last after {done.total_s:.2f} s]")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
