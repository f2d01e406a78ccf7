"""The wire between agents: TCP on the fabric's addresses, both ends proven by a shared secret, JSON lines.

    leader -> worker  {"nonce": A}
    worker -> leader  {"rank": r, "nonce": B, "mac": HMAC(secret, "worker" A B r)}
    leader -> worker  {"mac": HMAC(secret, "leader" B A r)}
    then, both ways   JSON, TAB, HMAC(session key, direction, count, JSON)

The secret never crosses the wire, no message can be replayed, moved to another connection or turned around. There is
one wire for each rail; a message goes over all of them, so one rail is enough.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkpair_rank import core

LINE_MOST = 65536
"""Longest line in bytes; a status has about 600."""
GREETING_S = 3.0
"""Longest handshake in seconds."""
STRANGERS_MOST = 16
"""Most connections that have not proven themselves yet."""
RETRY_S = 1.0
IP_FREEBIND = 15
"""Linux: bind to an address that is not there yet, as at boot."""
TCP_USER_TIMEOUT_MS = 6000


def mac(key: bytes, *parts: str) -> str:
    """HMAC-SHA256 over parts that cannot run into each other."""
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


def encode(message: core.Status | core.Order) -> dict[str, Any]:
    """A message as plain data."""
    return {"type": type(message).__name__, **asdict(message)}


def decode(data: dict[str, Any]) -> core.Status | core.Order:
    """The message in plain data. Raises ValueError when it is none."""
    fields = dict(data)
    kind = fields.pop("type", None)
    try:
        if kind == "Order":
            return core.Order(**fields)
        if kind == "Status":
            cause = fields.pop("cause")
            incarnation, number = fields.pop("obeys")
            return core.Status(
                **fields, cause=core.Cause(**cause) if cause else None, obeys=(str(incarnation), int(number))
            )
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"no message: {error}") from error
    raise ValueError(f"no message: type {kind!r}")


@dataclass
class Wire:
    """One connection. `rank` is the peer's, -1 until it has proven it."""

    sock: socket.socket
    rail: int
    leads: bool
    rank: int = -1
    opened: float = 0.0
    heard: float = 0.0
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    theirs: str = ""
    key: bytes = b""
    proven: bool = False
    connecting: bool = False
    sent: int = 0
    got: int = 0
    inbox: bytes = b""
    outbox: bytes = b""

    def push(self, data: dict[str, Any]) -> None:
        """Queue a line, signed once both ends are proven."""
        text = json.dumps(data, separators=(",", ":"))
        if self.proven:
            self.sent += 1
            text += "\t" + mac(self.key, "leader" if self.leads else "worker", str(self.sent), text)
        self.outbox += text.encode() + b"\n"

    def open_line(self, line: bytes) -> dict[str, Any]:
        """The content of a received line. Raises ValueError when it is not what the peer signed."""
        text = line.decode()
        if self.proven:
            text, _, signature = text.rpartition("\t")
            self.got += 1
            if not hmac.compare_digest(
                signature, mac(self.key, "worker" if self.leads else "leader", str(self.got), text)
            ):
                raise ValueError("a line with a wrong signature")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("a line that is no object")
        return data


class Links:
    """All wires of one agent. Not blocking: the owner's selector says when to call."""

    def __init__(
        self,
        rank: int,
        rails: list[list[str]],
        port: int,
        secret: bytes,
        selector: selectors.BaseSelector,
        deliver: Callable[[core.Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.rank, self.rails, self.port, self.secret = rank, rails, port, secret
        self.selector, self.deliver, self.say = selector, deliver, say
        self.leads = rank == 0
        self.wires: list[Wire] = []
        self.listeners: dict[int, socket.socket] = {}
        self.tried: dict[int, float] = {}
        self.told: set[str] = set()

    def rails_heard(self, now: float) -> dict[int, dict[int, float]]:
        """Peer rank -> rail -> seconds since it was last heard there."""
        heard: dict[int, dict[int, float]] = {}
        for wire in self.wires:
            if wire.proven:
                heard.setdefault(wire.rank, {})[wire.rail] = round(now - wire.heard, 1)
        return heard

    def tend(self, now: float, silence: float) -> None:
        """Open what is missing, drop what is silent. Call about once a second."""
        for wire in list(self.wires):
            limit = silence if wire.proven else GREETING_S
            if now - max(wire.heard, wire.opened) > limit:
                self.drop(wire, "silent", told=False)
        for rail, by_rank in enumerate(self.rails):
            if not by_rank[0] or not by_rank[self.rank]:
                continue  # in a ring a rail joins two nodes, and an address of the others is empty
            if self.leads:
                if rail not in self.listeners:
                    self._listen(rail)
            elif not any(wire.rail == rail for wire in self.wires) and now - self.tried.get(rail, -9.0) >= RETRY_S:
                self.tried[rail] = now
                self._connect(rail, now)

    def broadcast(self, message: core.Status | core.Order) -> None:
        """Send to every proven peer over every rail."""
        data = encode(message)
        for wire in list(self.wires):
            if wire.proven:
                wire.push(data)
                self._flush(wire)

    def close(self) -> None:
        """Send what is queued, as far as it goes at once, and close everything."""
        for wire in list(self.wires):
            self._flush(wire)
        for wire in list(self.wires):
            self.selector.unregister(wire.sock)
            wire.sock.close()
        for listener in self.listeners.values():
            self.selector.unregister(listener)
            listener.close()
        self.wires, self.listeners = [], {}

    def _once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            self.say(text)

    def _listen(self, rail: int) -> None:
        address = self.rails[rail][0]
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)
            listener.bind((address, self.port))
            listener.listen(STRANGERS_MOST)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            self._once(f"cannot listen on {address}:{self.port}: {error}")
            return
        self.listeners[rail] = listener
        self.selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener, rail))

    def _accept(self, listener: socket.socket, rail: int) -> None:
        try:
            sock, (address, _) = listener.accept()
        except OSError:
            return
        strangers = sum(not wire.proven for wire in self.wires)
        if address not in self.rails[rail][1:] or strangers >= STRANGERS_MOST:
            sock.close()
            return
        wire = self._add(sock, rail)
        wire.push({"nonce": wire.nonce})
        self._flush(wire)

    def _connect(self, rail: int, now: float) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            # Leave by this rail's own address: the answer must come back over the same rail.
            sock.bind((self.rails[rail][self.rank], 0))
            code = sock.connect_ex((self.rails[rail][0], self.port))
        except OSError:
            sock.close()
            return
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return
        wire = self._add(sock, rail)
        wire.rank, wire.connecting = 0, code != 0
        self._watch(wire)

    def _add(self, sock: socket.socket, rail: int) -> Wire:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        now = time.monotonic()
        wire = Wire(sock, rail, self.leads, opened=now, heard=now)
        self.wires.append(wire)
        self.selector.register(sock, selectors.EVENT_READ, lambda mask: self._ready(wire, mask))
        return wire

    def _watch(self, wire: Wire) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.outbox or wire.connecting else 0)
        self.selector.modify(wire.sock, events, lambda mask: self._ready(wire, mask))

    def drop(self, wire: Wire, why: str, told: bool) -> None:
        """Close a wire. `told`: the peer itself closed it, so its agent ended if it was the last one."""
        if wire not in self.wires:
            return
        self.wires.remove(wire)
        self.selector.unregister(wire.sock)
        wire.sock.close()
        if not wire.proven:
            return
        self.say(f"rail {wire.rail} to rank {wire.rank}: {why}")
        if told and not any(other.proven and other.rank == wire.rank for other in self.wires):
            self.deliver(core.Closed(wire.rank))

    def _flush(self, wire: Wire) -> None:
        if wire not in self.wires or wire.connecting:
            return None
        try:
            while wire.outbox:
                wire.outbox = wire.outbox[wire.sock.send(wire.outbox) :]
        except BlockingIOError:
            pass
        except OSError as error:
            return self.drop(wire, str(error), told=error.errno in (errno.ECONNRESET, errno.EPIPE))
        if len(wire.outbox) > LINE_MOST:
            return self.drop(wire, "does not take what is sent", told=False)
        return self._watch(wire)

    def _ready(self, wire: Wire, mask: int) -> None:
        if wire not in self.wires:
            return None  # dropped by an earlier event of the same round
        if wire.connecting and mask & selectors.EVENT_WRITE:
            if wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return self.drop(wire, "not reachable", told=False)
            wire.connecting = False
        if mask & selectors.EVENT_WRITE:
            self._flush(wire)
        if mask & selectors.EVENT_READ and wire in self.wires:
            self._read(wire)
        return None

    def _read(self, wire: Wire) -> None:
        try:
            data = wire.sock.recv(LINE_MOST)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(wire, str(error), told=error.errno == errno.ECONNRESET)
            return
        if not data:
            self.drop(wire, "closed by the peer", told=True)
            return
        wire.inbox += data
        *lines, wire.inbox = wire.inbox.split(b"\n")
        try:
            if len(wire.inbox) > LINE_MOST:
                raise ValueError("a line that is too long")
            for line in lines:
                self._line(wire, line)
                if wire not in self.wires:
                    return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._once(f"rail {wire.rail}: dropped a peer that sent {error or type(error).__name__}")
            self.drop(wire, f"sent {error}", told=False)

    def _line(self, wire: Wire, line: bytes) -> None:
        data = wire.open_line(line)
        wire.heard = time.monotonic()
        if wire.proven:
            message = decode(data)
            if isinstance(message, core.Status) and message.rank != wire.rank:
                raise ValueError("the status of another rank")
            self.deliver(core.Heard(message))
        elif self.leads:
            rank, theirs = int(data["rank"]), str(data["nonce"])
            proof = mac(self.secret, "worker", wire.nonce, theirs, str(rank))
            known = 0 < rank < len(self.rails[wire.rail]) and wire.sock.getpeername()[0] == self.rails[wire.rail][rank]
            if not known or not hmac.compare_digest(str(data["mac"]), proof):
                raise ValueError("a wrong proof: is /etc/sparkpair/agent-secret the same on every node?")
            wire.push({"mac": mac(self.secret, "leader", theirs, wire.nonce, str(rank))})
            self._prove(wire, rank, wire.nonce, theirs)
        elif not wire.theirs:
            wire.theirs = str(data["nonce"])
            proof = mac(self.secret, "worker", wire.theirs, wire.nonce, str(self.rank))
            wire.push({"rank": self.rank, "nonce": wire.nonce, "mac": proof})
            self._flush(wire)
        else:
            proof = mac(self.secret, "leader", wire.nonce, wire.theirs, str(self.rank))
            if not hmac.compare_digest(str(data["mac"]), proof):
                raise ValueError("a wrong proof: is /etc/sparkpair/agent-secret the same on every node?")
            self._prove(wire, 0, wire.theirs, wire.nonce)

    def _prove(self, wire: Wire, rank: int, leaders: str, workers: str) -> None:
        self._flush(wire)
        if wire not in self.wires:
            return
        for old in [w for w in self.wires if w is not wire and w.proven and w.rank == rank and w.rail == wire.rail]:
            self.drop(old, "replaced by a new one", told=False)
        wire.rank, wire.key = rank, mac(self.secret, "session", leaders, workers).encode()
        wire.proven = True
        self.say(f"rail {wire.rail} to rank {rank}: up")
