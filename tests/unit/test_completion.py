"""A streamed completion, against a real HTTP server on loopback that answers as vLLM was seen to."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from ansible.module_utils.sparkpair.completion import (
    CLOSED,
    GUARDED,
    ProbeError,
    ask,
    guard_faults,
    main,
    network_faults,
)
from sparkpair_rank import probes


def chunk(text, finish=None):
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


@pytest.fixture
def api():
    """A loopback API: set `.lines`, `.status` and `.key` before asking."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.headers.get("Authorization"), asked))
            self.send_response(server.status)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in server.lines).encode())

        def do_GET(self):
            wrong = server.key and self.headers.get("Authorization") != f"Bearer {server.key}"
            self.send_response(401 if wrong else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.lines, server.status, server.key, server.asked = [], 200, "", []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def probe(api, key=""):
    return ask("127.0.0.1", api.server_port, "tiny", "hi", 4, key, 5.0)


def test_a_stream_is_read_to_its_end(api):
    api.lines = [": comment", chunk(""), chunk("he"), chunk("llo", "length"), "data: [DONE]"]
    done = probe(api, "secret")
    assert (done.text, done.chunks, done.finish) == ("hello", 2, "length")
    assert 0 < done.first_token_s <= done.total_s
    authorization, asked = api.asked[0]
    assert authorization == "Bearer secret" and asked["stream"] is True and asked["model"] == "tiny"


def test_an_error_chunk_fails_though_the_status_is_200(api):
    api.lines = [chunk("he"), 'data: {"error": {"message": "EngineCore encountered an issue"}}', "data: [DONE]"]
    with pytest.raises(ProbeError, match="EngineCore"):
        probe(api)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([chunk("he")], r"without \[DONE\]"),
        ([], r"without \[DONE\]"),
        (["data: [DONE]"], r"without any text"),
        (["data: {broken", "data: [DONE]"], "no event"),
        (["data: 7", "data: [DONE]"], "no event"),
        (['data: {"choices": {"x": 1}}', "data: [DONE]"], "no event"),
        (['data: {"choices": [{"delta": {"content": 1}}]}', "data: [DONE]"], "no event"),
    ],
)
def test_a_stream_that_is_no_answer_fails(api, lines, words):
    api.lines = lines
    with pytest.raises(ProbeError, match=words):
        probe(api)


@pytest.mark.parametrize("header", [f"Content-Length: {10**23}", "Transfer-Encoding: chunked\r\n\r\n-5"])
def test_numbers_that_no_server_sends_are_an_answer_too(header):
    def answer():
        for _ in range(2):
            client, _ = server.accept()
            with client:
                client.recv(10_000)
                client.sendall(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(ProbeError):
            ask("127.0.0.1", port, "tiny", "hi", 4, "", 5.0)
        assert probes.ask(probes.Api("127.0.0.1", port, "tiny"), "GET", "/metrics", None, 5.0)[0] == "broken"


def test_a_refusal_shows_its_status(api):
    api.status, api.lines = 404, ['{"error": "no such model"}']
    with pytest.raises(ProbeError, match=r"HTTP 404.*no such model"):
        probe(api)


def test_nothing_that_listens_fails(api):
    port = api.server_port
    api.shutdown()
    api.server_close()
    with pytest.raises(ProbeError, match="no answer"):
        ask("127.0.0.1", port, "tiny", "hi", 4, "", 1.0)


def test_who_may_ask_for_what_is_tried(api):
    def faults(*keys):
        return guard_faults("127.0.0.1", api.server_port, list(keys), 5.0)

    api.key = "secret"
    assert faults("secret") == []
    assert faults("secret", "other") == ["/v1/models with key 2: HTTP 401, expected 200"]
    assert len(faults("wrong")) == 3
    api.key = ""
    assert faults("secret") == [f"{path} without a key: HTTP 200, expected 401" for path in GUARDED]


def test_routes_that_another_node_gets_are_named(api):
    api.key = "secret"
    found = network_faults("127.0.0.1", api.server_port, 5.0)
    assert found == [f"{path} from here: HTTP 401, expected 403" for path in CLOSED]
    assert "/metrics" in CLOSED and "/v1/models" not in CLOSED


def test_an_answer_that_drips_is_late():
    def drip():
        client, _ = server.accept()
        with client, suppress(OSError):
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                client.sendall(b": x\n")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(ProbeError, match="no answer to /v1/chat/completions within 1 s"):
            ask("127.0.0.1", server.getsockname()[1], "tiny", "hi", 4, "", 0.6)
        assert time.monotonic() - started < 2


def test_the_demo_shows_the_text_as_it_comes(api, capsys, monkeypatch):
    monkeypatch.setattr("ansible.module_utils.sparkpair.completion.PORT", api.server_port)
    api.lines = [chunk("he"), chunk("llo", "length"), "data: [DONE]"]
    assert main() == 0
    assert capsys.readouterr().out.startswith("hello\n[2 chunks; the first after 0.")
    api.lines = []
    assert main() == 1
