"""Copy a model between nodes: the head serves its complete folder for a while, every peer pulls the pieces
it lacks.

The server answers on one address (the head's on the fabric), to requests that carry the run's random token,
by file number and never by path, and ends as soon as every peer has reported, or when none has asked for
``IDLE`` seconds. A peer pulls with several streams; each piece is hashed while it arrives and is fetched
again when it differs from the manifest, so a finished copy is a proven one. What an earlier, broken copy
left is read and kept where it is right. Standard library only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import hmac
import http.client
import http.server
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from ansible.module_utils.sparkpair.model import (
    PIECE,
    File,
    Manifest,
    ModelError,
    Place,
    Progress,
    finish,
    hash_piece,
    parse_manifest,
    piece_count,
    read_manifest,
    reopen,
    replace_file,
    require_space,
)

IDLE = 60.0
"""Seconds without a request after which the server gives up on peers that have not reported."""

CONNECT = 60.0
"""Seconds that a peer waits for the server to answer at all: both are started by the same task."""

TIMEOUT = 30.0
"""Seconds without a byte after which a stream is opened anew."""

BEAT = 5.0
"""Seconds between lines of progress, each with a sign of life to the server; well below ``IDLE``."""

WRITE = 4 << 20
"""Bytes written at once; smaller ones wait for the disk more often."""

SECTOR = 4096
"""Bytes that a write past the page cache is a multiple of."""

TRIES = 5
"""Attempts at one piece."""

FABRIC = "check the fabric (playbooks/fabric.yml) and run again"


class Server(http.server.ThreadingHTTPServer):
    """Serves one complete folder until ``peers`` peers have reported."""

    daemon_threads = True

    def __init__(self, address: str, port: int, token: str, folder: Path, peers: int) -> None:
        manifest = read_manifest(folder)
        if manifest is None:
            raise ModelError(f"{folder} is not complete on the head; run playbooks/model.yml")
        self.address, self.folder, self.manifest, self.token = address, folder, manifest, token
        self.text = manifest.to_json().encode()
        self.left, self.failed = peers, list[str]()
        self.changed = threading.Condition()
        self.busy, self.last = 0, time.monotonic()
        try:
            super().__init__((address, port), Handler)
        except OSError as error:
            raise ModelError(f"the head cannot listen on {address}:{port} ({error}); {FABRIC}") from error

    def serve(self, idle: float = IDLE) -> None:
        """Serve until all peers have reported.

        Raises:
            ModelError: a peer reported that it failed, or nobody asked for ``idle`` seconds.
        """
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            with self.changed:
                while self.left > 0:
                    self.changed.wait(0.5)
                    if not self.busy and time.monotonic() - self.last > idle:
                        raise ModelError(
                            f"{self.left} peer(s) did not ask {self.address} for files for {idle:.0f} s; all nodes "
                            f"must be in the run (no --limit, as many forks as nodes), then {FABRIC}"
                        )
        finally:
            self.shutdown()
            self.server_close()
            thread.join()
        if self.failed:
            raise ModelError(f"{len(self.failed)} peer(s) could not copy the files: {'; '.join(self.failed)}")


class Handler(http.server.BaseHTTPRequestHandler):
    """``GET /manifest``, ``GET /file/<number>`` with a Range, ``POST /done``; all with the token."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT

    def log_message(self, *_: object) -> None:
        """Say nothing: the peers write the log."""

    def _begin(self) -> bool:
        with self.server.changed:
            self.server.busy += 1
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self.close_connection = True
        self._answer(HTTPStatus.UNAUTHORIZED, b"")
        return False

    def _end(self) -> None:
        with self.server.changed:
            self.server.busy -= 1
            self.server.last = time.monotonic()

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer with the manifest or a part of a file."""
        try:
            if not self._begin():
                return
            asked = re.fullmatch(r"/file/(\d{1,7})", self.path)
            ranged = re.fullmatch(r"bytes=(\d{1,18})-(\d{1,18})", self.headers.get("Range", ""))
            if self.path == "/manifest":
                self._answer(HTTPStatus.OK, self.server.text)
            elif asked and ranged and int(asked[1]) < len(self.server.manifest.files):
                self._send_part(self.server.manifest.files[int(asked[1])], int(ranged[1]), int(ranged[2]) + 1)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"")
        finally:
            self._end()

    def _send_part(self, file: File, start: int, end: int) -> None:
        end = min(end, file.size)
        with (self.server.folder / file.path).open("rb", buffering=0) as source:
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(max(0, end - start)))
            self.end_headers()
            if end > start:
                self.connection.sendfile(source, start, end - start)

    def do_POST(self) -> None:
        """Take a peer's report: empty when all is well, else its error."""
        try:
            if not self._begin():
                return
            report = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 10_000)).decode(errors="replace")
            self._answer(HTTPStatus.OK, b"")
            with self.server.changed:
                self.server.left -= 1
                if report:
                    self.server.failed.append(report)
                self.server.changed.notify_all()
        finally:
            self._end()


class Source:
    """A peer's view of the server: one connection per thread, opened when it is needed."""

    def __init__(self, address: str, port: int, token: str) -> None:
        self.address, self.port = address, port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def request(
        self, method: str, path: str, part: tuple[int, int] | None = None, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Send a request; ``part`` is a range of bytes, end excluded. Return the response with its body
        unread.

        Raises:
            ModelError: the token was refused, or there is no such file.
            OSError, http.client.HTTPException: the connection broke.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT)
            self._open.append(connection)
        headers = self._headers | ({"Range": f"bytes={part[0]}-{part[1] - 1}"} if part else {})
        connection.request(method, path, body=body, headers=headers)
        response: http.client.HTTPResponse = connection.getresponse()
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            response.close()
            self.close()
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise ModelError(
                f"the head at {self.address} refused this run's token; run playbooks/model.yml for all nodes at once"
            )
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise ModelError(f"the head at {self.address} answered {response.status} to {path}; {FABRIC}")
        return response

    def close(self) -> None:
        """Drop this thread's connection."""
        if connection := getattr(self._local, "connection", None):
            connection.close()
            self._local.connection = None

    def close_all(self) -> None:
        """Drop the connections of all threads, which have ended."""
        for connection in self._open:
            connection.close()

    def manifest(self, wait: float = CONNECT) -> Manifest:
        """Return the head's manifest, waiting until the head listens.

        Raises:
            ModelError: it does not within ``wait`` seconds.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                return parse_manifest(self.request("GET", "/manifest").read().decode())
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"the head does not answer at {self.address}:{self.port} ({error}); {FABRIC}"
                    ) from error
                time.sleep(0.2)

    def report(self, error: str) -> None:
        """Tell the head that this peer is done, or why it failed. A head that is gone needs no report."""
        self._say("POST", "/done", error.encode())

    def keep_alive(self) -> None:
        """Tell the head that this peer is busy with its own disk."""
        self._say("GET", "/manifest")

    def _say(self, method: str, path: str, body: bytes | None = None) -> None:
        """Send a request on a new connection: the server drops one that was idle for ``TIMEOUT``."""
        self.close()
        with contextlib.suppress(OSError, http.client.HTTPException, ModelError):
            self.request(method, path, body=body).read()
        self.close()


def copy(place: Place, source: Source, streams: int, say: Progress) -> Manifest:
    """Bring the place to what the head has. Return the manifest.

    Raises:
        ModelError: no space, no connection, or pieces that stay different from the manifest.
        OSError: the disk failed.
    """
    try:
        manifest = source.manifest()
        reopen(place, [f.path for f in manifest.files])
        pull(place.partial, manifest, source, streams, say)
        finish(place, Manifest(manifest.files))
    except (ModelError, OSError) as error:
        source.report(str(error) or type(error).__name__)
        raise
    else:
        source.report("")
        return manifest
    finally:
        source.close_all()


def pull(folder: Path, manifest: Manifest, source: Source, streams: int, say: Progress) -> None:
    """Fill ``folder`` with the files of the manifest, ``streams`` pieces at a time; keep pieces that are
    right.

    Raises:
        ModelError, OSError: see ``copy``. The folder stays, and the next pull goes on with it.
    """
    meter = Meter(manifest.size, say, source.keep_alive)
    with concurrent.futures.ThreadPoolExecutor(max_workers=streams) as pool, contextlib.ExitStack() as opened:
        jobs = [(file, index) for file in manifest.files for index in range(piece_count(file.size))]
        right = pool.map(lambda job: _is_right(folder, job[0], job[1], meter), jobs)
        wrong = [job for job, ok in zip(jobs, right, strict=True) if not ok]
        lacking = {file.path for file, _ in wrong}
        # A file that is linked elsewhere is written anew, all of it.
        require_space(folder, sum(_new_bytes(folder, f, wrong) for f in manifest.files if f.path in lacking))
        handles = {}
        for file in manifest.files:
            if file.path in lacking or (folder / file.path).stat().st_size != file.size:
                handles[file.path] = _open(folder / file.path, file.size)
                opened.callback(os.close, handles[file.path])
                meter.add(0, fetched=False)
        numbers = {file.path: number for number, file in enumerate(manifest.files)}
        work = [pool.submit(_piece, source, f, numbers[f.path], i, handles[f.path], meter) for f, i in wrong]
        try:
            for each in concurrent.futures.as_completed(work):
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for file in manifest.files:
            descriptor = handles.get(file.path, -1)
            if descriptor >= 0:
                os.ftruncate(descriptor, file.size)
            else:  # what a run that broke off had read from the network may be in memory alone
                descriptor = os.open(folder / file.path, os.O_RDONLY)
                opened.callback(os.close, descriptor)
            os.fsync(descriptor)
            meter.add(0, fetched=False)
    meter.tell(last=True)


def _bounds(file: File, index: int) -> tuple[int, int]:
    return index * PIECE, min(file.size, (index + 1) * PIECE)


def _is_right(folder: Path, file: File, index: int, meter: Meter) -> bool:
    """Return whether a piece is there already, by its sha256."""
    try:
        descriptor = os.open(folder / file.path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if hash_piece(descriptor, index, file.size) != file.pieces[index]:
            return False
    finally:
        os.close(descriptor)
    start, end = _bounds(file, index)
    meter.add(end - start, fetched=False)
    return True


def _new_bytes(folder: Path, file: File, wrong: list[tuple[File, int]]) -> int:
    """Return the bytes of disk that mending a file takes; damaged pieces are written over, holes are filled."""
    path = folder / file.path
    stat = path.stat() if path.exists() else None
    if stat and stat.st_nlink > 1:
        return int(file.size)
    if stat and stat.st_blocks * 512 >= file.size:
        return 0
    return sum(end - start for f, i in wrong if f.path == file.path for start, end in [_bounds(f, i)])


def _open(path: Path, size: int) -> int:
    """Return a descriptor of a file of that size to write to, whose bytes are nobody else's.

    Past the page cache where the file system can: nothing is copied there, the disk does not wait for the kernel, and
    the GPU's memory is not filled with weights. 1325 to 1450 MB/s where it was 772 and 781 (`make bench-copy`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_nlink > 1:
        replace_file(path, path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, size)
    return descriptor


def _piece(source: Source, file: File, number: int, index: int, descriptor: int, meter: Meter) -> None:
    """Fetch one piece until it is right, up to ``TRIES`` times."""
    start, end = _bounds(file, index)
    for attempt in range(TRIES):
        try:
            problem = "its sha256 differs"
            if _fetch(source, number, start, end, descriptor) == file.pieces[index]:
                meter.add(end - start, fetched=True)
                return
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            problem = str(error) or type(error).__name__
            source.close()
            time.sleep(min(2**attempt, 8) * 0.25)
    raise ModelError(
        f"piece {index} of {file.path} could not be copied from {source.address} ({problem}, {TRIES} attempts); "
        "the head's file may be damaged: run playbooks/model.yml -e model_verify=true"
    )


DISK_ERRORS = {errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT}
"""Another attempt does not help."""


def _fetch(source: Source, number: int, start: int, end: int, descriptor: int) -> str:
    """Copy one range of a file from the head to the same place here. Return its sha256."""
    digest = hashlib.sha256()
    if start == end:
        return digest.hexdigest()
    response = source.request("GET", f"/file/{number}", (start, end))
    buffer = memoryview(mmap.mmap(-1, WRITE))
    for position in range(start, end, WRITE):
        wanted, filled = min(WRITE, end - position), 0
        while filled < wanted:
            count = response.readinto(buffer[filled:wanted])
            if not count:
                raise http.client.IncompleteRead(b"", end - position - filled)
            digest.update(buffer[filled : filled + count])
            filled += count
        # Whole sectors, as such a descriptor asks for; the file is cut to its size at the end.
        _write(descriptor, buffer[: -(-wanted // SECTOR) * SECTOR], position)
    response.read()
    return digest.hexdigest()


def _write(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of ``data``; through the page cache where the file system refuses to go past it."""
    while data:
        try:
            count = os.pwrite(descriptor, data, position)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        else:
            data, position = data[count:], position + count


class Meter:
    """Counts bytes from all streams; every ``BEAT`` seconds it tells the progress, and the head by ``beat``."""

    def __init__(self, total: int, say: Progress, beat: Callable[[], None]) -> None:
        self._total, self._say, self._beat, self._lock = total, say, beat, threading.Lock()
        self.kept = self.fetched = 0
        self._begun = self._told = time.monotonic()

    def add(self, count: int, fetched: bool) -> None:
        """Count ``count`` bytes, fetched or found to be right already."""
        with self._lock:
            if fetched:
                self.fetched += count
            else:
                self.kept += count
            due = time.monotonic() - self._told > BEAT
            if due:
                self.tell()
        if due:
            self._beat()

    def tell(self, last: bool = False) -> None:
        """Say how far it is."""
        self._told = time.monotonic()
        seconds = max(self._told - self._begun, 1e-3)
        done = self.kept + self.fetched
        self._say(
            f"{'copied' if last else 'copying'} {done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{self.kept / 1e9:.2f} GB of it were there, {self.fetched / seconds / 1e6:.0f} MB/s"
        )
