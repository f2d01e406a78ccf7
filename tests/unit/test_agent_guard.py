"""Who may ask for what: keys on every route, few routes for a network."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from sparkpair_rank import guard

KEYS = [hashlib.sha256(key).digest() for key in (b"first", b"second")]
NETWORK, LOCAL = "192.0.2.7", "127.0.0.1"
HEAD = "192.0.2.1"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v2/embed"])
@pytest.mark.parametrize("client", [NETWORK, LOCAL, "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("headers", "status"), [([], 401), (bearer("wrong"), 401), (bearer("first"), 200), (bearer("second"), 200)]
)
def test_every_key_opens_and_nothing_else_does(path, client, headers, status):
    assert guard.verdict(path, "POST", headers, guard.is_local(client), KEYS)[0] == status


@pytest.mark.parametrize(
    "path", ["/metrics", "/tokenize", "/invocations", "/version", "/load", "/docs", "/inference/x", "/v1"]
)
def test_other_routes_are_closed_to_a_network_even_with_a_key(path):
    assert guard.verdict(path, "GET", bearer("first"), False, KEYS)[0] == 403
    assert guard.verdict(path, "GET", bearer("first"), True, KEYS)[0] == 200
    assert guard.verdict(path, "GET", [], True, KEYS)[0] == 401


def test_health_needs_no_key_and_an_api_without_keys_is_open_on_loopback():
    assert guard.verdict("/health", "GET", [], False, KEYS)[0] == 200
    assert guard.verdict("/metrics", "GET", [], True, [])[0] == 200
    assert guard.verdict("/metrics", "GET", [], False, [])[0] == 403


@pytest.mark.parametrize(
    ("client", "local"),
    [(LOCAL, True), ("::1", True), ("::ffff:127.0.0.1", True), (HEAD, True), (NETWORK, False), ("testclient", False)],
)
def test_the_agent_may_ask_an_api_that_is_bound_to_one_address(client, local):
    assert guard.is_local(client, HEAD) == local


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


def test_while_draining_new_requests_are_refused_and_running_ones_finish(tmp_path, monkeypatch):
    monkeypatch.setenv(guard.DRAINING, str(tmp_path / "draining"))
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    scope = {"type": "http", "path": "/v1/completions", "headers": [], "client": (LOCAL, 1), "method": "POST"}
    sent = []

    async def send(message):
        sent.append(message)

    async def drill():
        finish = asyncio.Event()

        async def app(scope, receive, send):
            await finish.wait()
            await send({"type": "http.response.start", "status": 200})

        made = guard.Guard(app)
        running = asyncio.create_task(made(scope, None, send))
        await asyncio.sleep(0)
        (tmp_path / "draining").touch()
        await made({**scope, "path": "/metrics", "method": "GET"}, None, send)
        finish.set()
        await running
        await made(scope, None, send)

    asyncio.run(drill())
    assert [message["status"] for message in sent if "status" in message] == [503, 200, 503]
    assert [json.loads(message["body"])["in_flight"] for message in sent if "body" in message] == [1, 0]
