"""Who may ask for what: keys on every route, few routes for a network."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from sparkpair_rank import guard

KEYS = [hashlib.sha256(key).digest() for key in (b"first", b"second")]
NETWORK, LOCAL = "192.0.2.7", "127.0.0.1"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v2/embed"])
@pytest.mark.parametrize("client", [NETWORK, LOCAL, "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("headers", "status"), [([], 401), (bearer("wrong"), 401), (bearer("first"), 200), (bearer("second"), 200)]
)
def test_every_key_opens_and_nothing_else_does(path, client, headers, status):
    assert guard.verdict(path, "POST", headers, client, KEYS)[0] == status


@pytest.mark.parametrize(
    "path", ["/metrics", "/tokenize", "/invocations", "/version", "/load", "/docs", "/inference/x", "/v1"]
)
def test_other_routes_are_closed_to_a_network_even_with_a_key(path):
    assert guard.verdict(path, "GET", bearer("first"), NETWORK, KEYS)[0] == 403
    assert guard.verdict(path, "GET", bearer("first"), LOCAL, KEYS)[0] == 200
    assert guard.verdict(path, "GET", [], LOCAL, KEYS)[0] == 401


def test_health_needs_no_key_and_an_api_without_keys_is_open_on_loopback():
    assert guard.verdict("/health", "GET", [], NETWORK, KEYS)[0] == 200
    assert guard.verdict("/metrics", "GET", [], LOCAL, [])[0] == 200
    assert guard.verdict("/metrics", "GET", [], "testclient", [])[0] == 403


def test_the_middleware_answers_itself_or_passes_on(tmp_path, monkeypatch):
    (tmp_path / "api-keys").write_text("first\n\nsecond\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    made = guard.Guard(app)
    for kind, path, headers in (
        ("http", "/v1/models", []),
        ("http", "/v1/models", bearer("second")),
        ("websocket", "/v1/realtime", []),
        ("lifespan", "", []),
    ):
        asyncio.run(
            made({"type": kind, "path": path, "headers": headers, "client": (LOCAL, 1), "method": "GET"}, None, send)
        )
    assert passed == ["/v1/models", ""]
    assert sent[0]["status"] == 401 and sent[2]["type"] == "websocket.close"
