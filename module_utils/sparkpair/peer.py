"""Start a rank's part on other nodes without ssh and without a key that stays.

While a test runs, every peer listens on its fabric address for one run's random secret; the head asks it to start
MPI's daemon. Requests and answers carry an HMAC over a nonce of the connection; the daemon is started without a
shell, and nothing else is. When the run is over the secret is worth nothing.

This file also runs alone, standard library only: mpirun calls a copy in place of ssh, as `peer.py HOST COMMAND...`.
The port is in SPARKPAIR_PEER_PORT, the secret in the credential `secret` that systemd gives to the unit.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DAEMONS = ("orted", "prted")
"""Programs that a peer starts for the head: the daemons of Open MPI 4 and 5."""

LIMIT = 256 << 20
"""Bytes of the longest message: a program with its copy in base64."""

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers one request."""


class PeerError(ValueError):
    """A peer that cannot be asked, or an answer that is not its own."""


def sign(secret: str, nonce: str, direction: str, body: str) -> str:
    """HMAC-SHA256 over one message of a connection, in hexadecimal."""
    return hmac.new(secret.encode(), f"{nonce}\n{direction}\n{body}".encode(), hashlib.sha256).hexdigest()


def pack(secret: str, nonce: str, direction: str, message: Mapping[str, Any]) -> bytes:
    """One signed line."""
    body = json.dumps(message)
    return (json.dumps({"mac": sign(secret, nonce, direction, body), "body": body}) + "\n").encode()


def unpack(secret: str, nonce: str, direction: str, line: bytes) -> dict[str, Any]:
    """The message of a signed line. Raises PeerError when it is not whole or not signed by this run's secret."""
    try:
        envelope = json.loads(line)
        body, mac = str(envelope["body"]), str(envelope["mac"])
        if not hmac.compare_digest(mac.encode(), sign(secret, nonce, direction, body).encode()):
            raise PeerError("a message that is not signed with this run's secret")
        message = json.loads(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError("a message that is not one signed line") from error
    if not isinstance(message, dict):
        raise PeerError("a message that is not one signed line")
    return message


def daemon_arguments(words: Sequence[str]) -> list[str]:
    """The daemon's command line in what mpirun gives to ssh. Raises PeerError when there is no daemon in it.

    mpirun writes it for a shell, and may set paths before it and close a bracket behind it; no shell reads it here.
    """
    try:
        split = shlex.split(" ".join(words))
    except ValueError as error:
        raise PeerError(f"a command that cannot be read ({error})") from error
    for at, word in enumerate(split):
        if word.rsplit("/", 1)[-1] in DAEMONS:
            return [word.rsplit("/", 1)[-1], *(rest for rest in split[at + 1 :] if rest != ")")]
    raise PeerError(f"a command without {' or '.join(DAEMONS)}")


class Server(socketserver.ThreadingTCPServer):
    """Answers signed requests on one address until it is told that the run is over."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, port: int, secret: str, handler: Handler) -> None:
        self.secret, self.handler = secret, handler
        self.over, self.asked = threading.Event(), threading.Event()
        super().__init__((address, port), Connection)

    def serve(self, first: float, seconds: float) -> bool:
        """Serve for `first` seconds until the head asks at all, then for `seconds`; whether it ended the run."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            return self.asked.wait(first) and self.over.wait(seconds)
        finally:
            self.shutdown()
            self.server_close()


class Connection(socketserver.StreamRequestHandler):
    """A nonce goes out, one signed request comes in, one signed answer goes out."""

    server: Server
    timeout = 30.0

    def handle(self) -> None:
        nonce = secrets.token_hex(32)
        try:
            self.wfile.write(f"{nonce}\n".encode())
            request = unpack(self.server.secret, nonce, "ask", self.rfile.readline(LIMIT))
        except (PeerError, OSError):
            return
        self.server.asked.set()
        self.connection.settimeout(None)
        try:
            answer = dict(self.server.handler(request))
        except (PeerError, OSError) as error:
            answer = {"status": 1, "out": "", "err": str(error)}
        try:
            self.wfile.write(pack(self.server.secret, nonce, "answer", answer))
        except OSError:
            return  # the head went away
        finally:
            if request.get("do") == "over":
                self.server.over.set()


def ask(address: str, port: int, secret: str, message: Mapping[str, Any], wait: float = 20.0) -> dict[str, Any]:
    """One request to a peer that may take `wait` seconds to listen. Raises PeerError."""
    deadline = time.monotonic() + wait
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(f"{address}:{port} does not answer ({error})") from error
            time.sleep(0.2)
    with connection, connection.makefile("rwb") as stream:
        try:
            nonce = stream.readline(1000).decode(errors="replace").strip()
            stream.write(pack(secret, nonce, "ask", message))
            stream.flush()
            connection.settimeout(None)
            line = stream.readline(LIMIT)
        except OSError as error:
            raise PeerError(f"{address}:{port} broke the connection ({error})") from error
    if not line:
        raise PeerError(f"{address}:{port} refused this run's secret")
    return unpack(secret, nonce, "answer", line)


def main(arguments: Sequence[str]) -> int:
    """Be ssh for mpirun: `HOST COMMAND...`. Returns the daemon's exit status."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    try:
        secret = (Path(folder) / "secret").read_text(encoding="ascii").strip()
        # The peer reads the words, once: read twice they would lose their quotes.
        request = {"do": "daemon", "command": list(arguments[1:])}
        answer = ask(arguments[0], int(os.environ["SPARKPAIR_PEER_PORT"]), secret, request)
    except (PeerError, OSError, KeyError, IndexError, ValueError) as error:
        print(f"peer: {error}", file=sys.stderr)
        return 255
    sys.stdout.write(str(answer.get("out", "")))
    sys.stderr.write(str(answer.get("err", "")))
    return int(answer.get("status", 255))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
