"""ASGI middleware for `vllm serve --middleware`: keys on every route, and few routes for a network.

vLLM's own key guards /v1, /v2, /inference and /cohere alone; /metrics, /tokenize, /invocations and others stay open
(read in 0.20 to 0.33). The keys come from a systemd credential, one a line: they are in no argument, variable or log.
While the file that `DRAINING` names exists, a new request is answered with 503 and the number of those in flight.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Scope = Mapping[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]
OPEN = ("/health", "/ping")
"""Tell nothing but that the server lives; load balancers ask without a key."""
NETWORK = ("/v1/", "/v2/", *OPEN)
"""What a client that is not on this node may ask for."""


DRAINING = "SPARKPAIR_DRAINING"
"""Variable that names the agent's file."""


def read_keys(folder: str) -> list[str]:
    """Keys in the credential api-keys, one a line; none without a file."""
    try:
        return [line.strip() for line in (Path(folder) / "api-keys").read_text().splitlines() if line.strip()]
    except OSError:
        return []


def is_local(client: str, server: str = "") -> bool:
    """Whether a client is on this node: its address is loopback, or the one that it reached the server at.

    The agent asks an API that is bound to one address at that address; from outside the kernel takes no packet that
    claims to come from an address of its own.
    """
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback or client == server


def verdict(
    path: str, method: str, headers: Iterable[tuple[bytes, bytes]], local: bool, hashes: Iterable[bytes]
) -> tuple[int, str]:
    """HTTP status and reason: 200 lets the request through. `hashes`: sha256 of the keys, none for an open API."""
    hashes = list(hashes)
    if not local and not path.startswith(NETWORK):
        return 403, "This route is closed to the network."
    if not hashes or path in OPEN or method == "OPTIONS":
        return 200, ""
    given = b""
    for name, value in headers:
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            given = value[7:].strip()
    digest = hashlib.sha256(given).digest()
    # All are compared, so that the time tells nothing about which one was near.
    fits = [hmac.compare_digest(digest, known) for known in hashes]
    return (200, "") if any(fits) else (401, "Unauthorized")


class Guard:
    """Refuses what `verdict` refuses, before vLLM sees it."""

    def __init__(self, app: App) -> None:
        self.app = app
        keys = read_keys(os.environ.get("CREDENTIALS_DIRECTORY", ""))
        self.hashes = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.draining = Path(os.environ[DRAINING]) if DRAINING in os.environ else None
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        client, server = ((scope.get(end) or ("", 0))[0] for end in ("client", "server"))
        local = is_local(client, server)
        status, reason = verdict(path, scope.get("method", "GET"), scope["headers"], local, self.hashes)
        if status == 200 and self.draining and self.draining.exists():
            status, reason = 503, "The server is being stopped."
        if status == 200:
            self.in_flight += 1
            try:
                return await self.app(scope, receive, send)
            finally:
                self.in_flight -= 1
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": reason})
        body = json.dumps({"error": reason, **({"in_flight": self.in_flight} if status == 503 else {})}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        return await send({"type": "http.response.body", "body": body})
