"""Stream one completion from the API of the node that this runs on, printing the text as it comes."""

from __future__ import annotations

import json
import sys
import time
import urllib.request

URL = "http://127.0.0.1:8000/v1/chat/completions"


def main() -> int:
    """Print the stream; returns 1 when no text came."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 48, "stream": True}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    started, first, chunks = time.monotonic(), 0.0, 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                print(f"\nthe stream carries an error: {event['error']}", file=sys.stderr)
                return 1
            text = event["choices"][0]["delta"].get("content") or ""
            if text:
                first = first or time.monotonic() - started
                chunks += 1
                print(text, end="", flush=True)
    print(f"\n[{chunks} chunks; the first after {first:.2f} s, the last after {time.monotonic() - started:.2f} s]")
    return 0 if chunks else 1


if __name__ == "__main__":
    sys.exit(main())
