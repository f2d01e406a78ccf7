"""A simulated model hub on loopback: as much of the protocol as huggingface_hub uses for a download, and what can fail.

One repository at one commit, made of the files of a folder. Files of 1000 bytes and more are "large": the hub tells
their sha256. Run ``python3 simulated_hub.py FOLDER PORT`` to serve a folder by hand, on a node of the lab for instance.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import sys
import threading
from http import HTTPStatus
from pathlib import Path

REPO = "simulated/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000


class SimulatedHub(http.server.ThreadingHTTPServer):
    """Serves ``folder``; the attributes say what goes wrong."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder
        self.token = ""
        """Token that requests for files must carry; empty: none."""
        self.cuts: dict[str, int] = {}
        """File to bytes of an answer after which the connection breaks."""
        self.lies: dict[str, bytes] = {}
        """File to the bytes that are sent in its place."""
        self.stalled: dict[str, threading.Event] = {}
        """File to what is waited for before it is sent."""
        self.missing: set[str] = set()
        """Files that are listed but not there."""
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and Range of all requests."""
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def names(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    def gets(self, name: str) -> list[str]:
        """The Ranges with which a file was fetched."""
        return [ranged for method, path, ranged in self.requests if method == "GET" and path.endswith(f"/{name}")]


class Handler(http.server.BaseHTTPRequestHandler):
    server: SimulatedHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        given = self.headers.get("Authorization", "")
        if given:
            self.server.tokens.add(given)
        if asked := re.fullmatch(rf"/api/models/{REPO}/(revision|tree)/([^/]+)", path):
            if asked[2] != COMMIT:
                self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            else:
                self._json(self._info() if asked[1] == "revision" else self._tree())
        elif asked := re.fullmatch(rf"/{REPO}/resolve/{COMMIT}/(.+)", path):
            if self.server.token and not given:
                self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo")
            elif self.server.token and given != f"Bearer {self.server.token}":
                self._refuse(HTTPStatus.FORBIDDEN, "GatedRepo")
            elif asked[1] in self.server.missing or asked[1] not in self.server.names():
                self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            else:
                self._file(asked[1], body)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _info(self) -> dict[str, object]:
        siblings = []
        for name in self.server.names():
            data = (self.server.folder / name).read_bytes()
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(data)} | ({"lfs": lfs} if len(data) >= LARGE else {}))
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "siblings": siblings}

    def _tree(self) -> list[dict[str, object]]:
        entries = []
        for name in self.server.names():
            data = (self.server.folder / name).read_bytes()
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            entries.append(entry | ({"lfs": lfs} if len(data) >= LARGE else {}))
        return entries

    def _file(self, name: str, body: bool) -> None:
        true = (self.server.folder / name).read_bytes()
        large = len(true) >= LARGE
        etag = hashlib.sha256(true).hexdigest() if large else hashlib.sha1(true).hexdigest()
        data = self.server.lies.get(name, true)
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else 0
        self.send_response(HTTPStatus.PARTIAL_CONTENT if ranged else HTTPStatus.OK)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(data) - start))
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            if name in self.server.stalled:
                self.server.stalled[name].wait(30)
            cut = self.server.cuts.get(name)
            self.wfile.write(data[start:] if cut is None else data[start : start + cut])
            self.close_connection = cut is not None


if __name__ == "__main__":
    hub = SimulatedHub(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"{REPO} at {COMMIT} on {hub.url}", flush=True)
    hub.serve_forever()
