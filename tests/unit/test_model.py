"""Weights: complete or absent, proven piece by piece, copied over loopback with everything that can go wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import model, model_copy, model_hub, model_task
from ansible.module_utils.sparkpair.model import ModelError, Place

from lab import tiny_model

PIECE = 1 << 16
TOKEN = "correct horse"
COMMIT = "0123456789" * 4


def quiet(_):
    pass


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(model, "PIECE", PIECE)
    monkeypatch.setattr(model_copy, "PIECE", PIECE)
    monkeypatch.setattr(model, "BLOCK", 10_000)
    monkeypatch.setattr(model_copy, "WRITE", 2 * model_copy.SECTOR)
    monkeypatch.setattr(model, "MARGIN", 0)
    monkeypatch.setattr(model, "WAIT", 0.0)
    monkeypatch.setattr(model_copy.time, "sleep", lambda _: None)


@pytest.fixture
def meters(monkeypatch):
    """All meters of the test: how much was kept and how much came over the network."""
    made = []

    class Remembered(model_copy.Meter):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(model_copy, "Meter", Remembered)
    return made


@pytest.fixture
def source(tmp_path):
    """A folder with a model of several files; the shards are no multiple of a piece."""
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    shards = {"model-1.safetensors": 5 * PIECE + 123, "model-2.safetensors": PIECE}
    for name, size in shards.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "empty").touch()
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden").touch()
    return folder


@pytest.fixture
def head(tmp_path, source):
    """The head's place, complete."""
    place = Place(tmp_path / "head", "m", "r1")
    model.take_folder(place, source, quiet)
    return place


@pytest.fixture
def peer(tmp_path):
    return Place(tmp_path / "peer", "m", "r1")


@contextlib.contextmanager
def serving(place, peers=1, idle=20.0):
    """A server on loopback. Gives (source for a peer, result): the result holds the server's error, if any."""
    server = model_copy.Server("127.0.0.1", 0, TOKEN, place.path, peers)
    result = []

    def serve():
        try:
            server.serve(idle)
        except ModelError as error:
            result.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield model_copy.Source("127.0.0.1", server.server_address[1], TOKEN), result
    finally:
        with server.changed:
            server.left = 0
            server.changed.notify_all()
        thread.join(10)
        assert not thread.is_alive()


def content(folder):
    return {p: (folder / p).read_bytes() for p in model.list_files(folder)}


def test_a_folder_is_taken_whole_and_without_what_is_hidden(head, source):
    manifest = model.read_manifest(head.path)
    assert [f.path for f in manifest.files] == [
        "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "sub/empty",
    ]  # fmt: skip
    assert content(head.path) == content(source)
    by_path = {f.path: f for f in manifest.files}
    shard = by_path["model-1.safetensors"]
    assert shard.sha256 == hashlib.sha256((source / shard.path).read_bytes()).hexdigest()
    assert len(shard.pieces) == 6
    assert shard.pieces[5] == hashlib.sha256((source / shard.path).read_bytes()[5 * PIECE :]).hexdigest()
    assert by_path["sub/empty"].pieces == (hashlib.sha256().hexdigest(),)
    assert not head.partial.exists()


def test_the_digest_is_that_of_the_content_alone(head, source, tmp_path):
    other = Place(tmp_path / "other", "n", "r2")
    os.utime(source / "config.json", (1, 1))
    assert model.take_folder(other, source, quiet).digest == model.read_manifest(head.path).digest
    (source / "config.json").write_text("{ }")
    third = Place(tmp_path / "third", "n", "r2")
    assert model.take_folder(third, source, quiet).digest != model.read_manifest(head.path).digest


@pytest.mark.parametrize("name", ["config.json", "model-2.safetensors"])
def test_a_folder_that_is_no_model_is_refused(source, tmp_path, name):
    (source / name).unlink()
    place = Place(tmp_path / "head", "m", "r1")
    with pytest.raises(
        ModelError,
        match="no config.json" if name == "config.json" else "without 1 of the 2 shards of its index, first model-2",
    ):
        model.take_folder(place, source, quiet)
    assert not place.path.exists()


@pytest.mark.parametrize("harm", ["cut", "gone", "manifest"])
def test_what_is_not_whole_is_not_complete(head, harm):
    assert model.read_manifest(head.path)
    if harm == "cut":
        with (head.path / "model-2.safetensors").open("r+b") as file:
            file.truncate(10)
    elif harm == "gone":
        (head.path / "config.json").unlink()
    else:
        (head.path / model.MANIFEST).write_text("{")
    assert model.read_manifest(head.path) is None


def test_damage_is_found_by_reading(head):
    manifest = model.read_manifest(head.path)
    assert model.damaged(head.path, manifest.files) == []
    flip(head.path / "model-1.safetensors", 3 * PIECE)
    assert model.damaged(head.path, manifest.files) == ["model-1.safetensors"]


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("path", ["/etc/passwd", "//etc/passwd", "../up", "a/../../up", "", "a\0b"])
def test_a_manifest_cannot_lead_outside(path):
    entry = {"path": path, "size": 1, "sha256": "a" * 64, "pieces": ["a" * 64]}
    with pytest.raises(ModelError, match="impossible entry"):
        model.parse_manifest(json.dumps({"files": [entry]}))


@pytest.mark.parametrize("text", ["", "[]", '{"files": [{}]}', '{"files": []}', '{"files": 1}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(ModelError):
        model.parse_manifest(text)


def test_a_copy_is_equal_and_leaves_nothing_running(head, peer):
    with serving(head) as (pull_from, result):
        manifest = model_copy.copy(peer, pull_from, 4, quiet)
    assert result == []
    assert content(peer.path) == content(head.path)
    assert model.read_manifest(peer.path).digest == manifest.digest == model.read_manifest(head.path).digest
    assert not peer.partial.exists()
    with socket.socket() as probe:
        assert probe.connect_ex((pull_from.address, pull_from.port)), "nobody listens any more"


def test_a_wrong_token_gets_nothing(head, peer):
    with serving(head) as (right, _):
        wrong = model_copy.Source(right.address, right.port, "wrong")
        with pytest.raises(ModelError, match="refused this run's token"):
            model_copy.copy(peer, wrong, 2, quiet)
        assert not peer.path.exists()
        for path in ("/manifest", "/file/0"):
            with pytest.raises(ModelError, match="refused this run's token"):
                wrong.request("GET", path)


@pytest.mark.parametrize("path", ["/", "/file/99", "/file/../x", "/file/0"])
def test_only_known_paths_are_answered(head, path):
    with serving(head) as (pull_from, _), pytest.raises(ModelError, match="answered 404"):
        pull_from.request("GET", path)


def test_a_file_that_is_damaged_on_the_head_is_not_accepted(head, peer):
    flip(head.path / "model-1.safetensors", 2 * PIECE + 5)
    complaint = r"piece 2 of model-1\.safetensors .* sha256 differs"
    with serving(head) as (pull_from, result), pytest.raises(ModelError, match=complaint):
        model_copy.copy(peer, pull_from, 2, quiet)
    assert not peer.path.exists()
    assert len(result) == 1
    assert "piece 2 of model-1.safetensors" in result[0]


class Cut(model_copy.Source):
    """A source whose head goes away after some requests."""

    left = 4

    def request(self, method, path, part=None, body=None):
        if path != "/manifest":
            Cut.left -= 1
            if Cut.left < 0:
                raise ConnectionResetError("the head went away")
        return super().request(method, path, part, body)


def test_an_interrupted_copy_goes_on_where_it_stopped(head, peer, meters):
    with serving(head) as (good, _):
        Cut.left = 4
        with pytest.raises(ModelError, match="the head went away"):
            model_copy.copy(peer, Cut(good.address, good.port, TOKEN), 1, quiet)
        assert not peer.path.exists()
        assert peer.partial.exists()
        model_copy.copy(peer, good, 2, quiet)
    assert content(peer.path) == content(head.path)
    assert meters[-1].kept >= 3 * PIECE


def test_only_the_damaged_piece_is_copied_again(head, peer, meters):
    with serving(head, peers=2) as (pull_from, _):
        model_copy.copy(peer, pull_from, 4, quiet)
        flip(peer.path / "model-1.safetensors", 3 * PIECE)
        (peer.path / "stranger.bin").touch()
        model_copy.copy(peer, pull_from, 4, quiet)
    assert content(peer.path) == content(head.path)
    assert meters[-1].fetched == PIECE


def test_a_short_answer_is_asked_for_again(head, peer):
    class Short(model_copy.Source):
        cut = 0

        def request(self, method, path, part=None, body=None):
            if part and Short.cut < 2:
                Short.cut += 1
                part = (part[0], part[0] + 10)
            return super().request(method, path, part, body)

    with serving(head) as (good, result):
        model_copy.copy(peer, Short(good.address, good.port, TOKEN), 2, quiet)
    assert result == []
    assert content(peer.path) == content(head.path)


def test_a_head_that_nobody_asks_gives_up(head):
    with serving(head, idle=0.2) as (_, result):
        for _ in range(100):
            if result:
                break
            threading.Event().wait(0.1)
    assert "1 peer(s) did not ask 127.0.0.1" in result[0]


def test_a_peer_that_reads_its_own_disk_for_long_is_not_given_up(head, peer, monkeypatch):
    with serving(head) as (pull_from, _):
        model_copy.copy(peer, pull_from, 4, quiet)

    def slowly(*arguments):
        threading.Event().wait(0.2)
        return model.hash_piece(*arguments)

    monkeypatch.setattr(model_copy, "hash_piece", slowly)
    monkeypatch.setattr(model_copy, "BEAT", 0.0)
    with serving(head, idle=1.0) as (pull_from, result):
        model_copy.copy(peer, pull_from, 1, quiet)
    assert result == []


def test_a_report_arrives_though_the_server_dropped_the_idle_connection(head, peer, monkeypatch):
    monkeypatch.setattr(model_copy.Handler, "timeout", 0.3)
    reported, post, fsync = threading.Event(), model_copy.Handler.do_POST, os.fsync

    def note(handler):
        post(handler)
        reported.set()

    def slowly(descriptor):
        threading.Event().wait(0.2)
        fsync(descriptor)

    monkeypatch.setattr(model_copy.Handler, "do_POST", note)
    monkeypatch.setattr(model_copy.os, "fsync", slowly)
    with serving(head) as (pull_from, result):
        model_copy.copy(peer, pull_from, 4, quiet)
        assert reported.wait(5)
    assert result == []


def test_a_file_system_that_refuses_to_go_past_the_page_cache_is_written_through_it(head, peer, monkeypatch):
    pwrite, refused = os.pwrite, []

    def picky(descriptor, data, position):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data[:5000], position)

    monkeypatch.setattr(model_copy.os, "pwrite", picky)
    with serving(head) as (pull_from, _):
        model_copy.copy(peer, pull_from, 1, quiet)
    # What opens no file past it needs no way back.
    assert refused or not fcntl.fcntl(model_copy._open(peer.path / "new", 1), fcntl.F_GETFL) & os.O_DIRECT
    (peer.path / "new").unlink(missing_ok=True)
    assert content(peer.path) == content(head.path)


def test_what_a_broken_run_read_is_on_the_disk_before_it_counts(head, peer, monkeypatch):
    fsync, synced = os.fsync, set()

    def broken(_):
        raise KeyboardInterrupt

    def note(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(model_copy.os, "fsync", broken)
    with serving(head) as (pull_from, _), pytest.raises(KeyboardInterrupt):
        model_copy.copy(peer, pull_from, 4, quiet)
    monkeypatch.setattr(model_copy.os, "fsync", note)
    with serving(head) as (pull_from, _):
        model_copy.copy(peer, pull_from, 4, quiet)
    assert {Path(path).name for path in content(head.path)} - synced <= {model.MANIFEST}


def test_a_peer_without_a_head_gives_up(peer):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ModelError, match=r"does not answer at 127\.0\.0\.1"):
        model_copy.Source("127.0.0.1", port, TOKEN).manifest(wait=0.1)


def test_a_head_without_weights_serves_nothing(peer):
    with pytest.raises(ModelError, match="not complete on the head"):
        model_copy.Server("127.0.0.1", 0, TOKEN, peer.path, 1)


def test_an_address_that_is_not_the_heads_is_named(head):
    with pytest.raises(ModelError, match=r"cannot listen on 203\.0\.113\.1"):
        model_copy.Server("203.0.113.1", 0, TOKEN, head.path, 1)


def test_no_space_is_said_to_both_before_anything_is_written(head, peer, monkeypatch):
    monkeypatch.setattr(model, "MARGIN", 1 << 60)
    with serving(head) as (pull_from, result), pytest.raises(ModelError, match=r"GB free for .* expected 1152921504"):
        model_copy.copy(peer, pull_from, 2, quiet)
    assert "GB free" in result[0]
    assert list(peer.partial.iterdir()) == []


def test_the_symlink_is_switched_only_to_complete_weights(head):
    assert not model.is_current(head)
    model.switch(head)
    assert model.is_current(head)
    assert (head.root / "current" / "config.json").exists()
    other = Place(head.root, "m", "r2")
    with pytest.raises(ModelError, match="not complete"):
        model.switch(other)
    assert model.is_current(head)


@pytest.mark.parametrize(
    ("name", "revision", "repo", "complaint"),
    [
        ("../x", "r", "", "plain name"),
        (".lock", "r", "", "plain name"),
        ("m", "", "", "plain name"),
        ("current", "r", "", "the symlink's"),
        ("m", "main", "o/r", "not a commit"),
        ("m", COMMIT[:-1], "o/r", "not a commit"),
    ],
)
def test_names_that_cannot_be_are_refused(name, revision, repo, complaint):
    with pytest.raises(ModelError, match=complaint):
        model.require_names(name, revision, repo)


def wish(root, **changes):
    base = {
        "node": "spark-a", "state": "current", "root": str(root), "name": "m", "revision": "r1", "source": "",
        "repo": "", "token": "", "ignore": [], "python": "/nowhere/python", "verify": False, "address": "", "port": 0,
        "secret": "", "peers": 0,
        "streams": 2, "log": str(root / "log" / "model.log"),
    }  # fmt: skip
    return base | changes


def test_the_module_predicts_then_does_and_is_idempotent(tmp_path, source):
    root = tmp_path / "root"
    from_source = {"source": str(source)}
    assert model_task.run(wish(root, **from_source), check=True)["changed"]
    assert not root.exists()
    assert model_task.run(wish(root, state="present", **from_source), check=False)["changed"]
    assert model_task.run(wish(root, **from_source), check=False)["changed"]
    for state in ("present", "current"):
        assert not model_task.run(wish(root, state=state, **from_source), check=False)["changed"]
    digest = model_task.run(wish(root), check=True)["digest"]

    (source / "config.json").write_text('{"new": 1}')
    assert model_task.run(wish(root, **from_source), check=True)["needed"], "the source has changed"
    assert model_task.run(wish(root, state="present", **from_source), check=False)["digest"] != digest


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("state", ["present", "current"])
def test_a_folder_in_the_place_of_the_symlink_is_said_before_anything_is_copied(tmp_path, source, state, check):
    root = tmp_path / "root"
    (root / "current").mkdir(parents=True)
    with pytest.raises(ModelError, match="expected a symlink"):
        model_task.run(wish(root, state=state, source=str(source)), check=check)
    assert [path.name for path in root.iterdir()] == ["current"]


def test_verify_finds_damage_and_the_source_mends_it(tmp_path, source):
    root = tmp_path / "root"
    model_task.run(wish(root, state="present", source=str(source)), check=False)
    folder = root / "m" / "r1"
    rot(folder / "model-1.safetensors", 7)
    assert model_task.run(wish(root, source=str(source)), check=True)["complete"]
    assert not model_task.run(wish(root, source=str(source), verify=True), check=True)["complete"]
    kept = (folder / "model-2.safetensors").stat().st_ino
    model_task.run(wish(root, state="present", source=str(source), verify=True), check=False)
    assert content(folder) == content(source)
    assert (folder / "model-2.safetensors").stat().st_ino == kept, "what is right is not copied again"


def rot(path, position):
    """Change a byte as a failing disk does: without a trace in the file's times."""
    before = path.stat()
    flip(path, position)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_was_written_to_is_read_again_and_only_that(tmp_path, source, monkeypatch):
    root = tmp_path / "root"
    from_source = wish(root, source=str(source))
    model_task.run(from_source | {"state": "present"}, check=False)
    model_task.run(from_source, check=False)
    assert model_task.run(from_source, check=True)["touched"] == 0
    shard = root / "m" / "r1" / "model-1.safetensors"
    flip(shard, 7)
    found = model_task.run(from_source, check=True)
    assert not found["complete"] and found["touched"] == 1

    flip(shard, 7)
    read, hash_file = [], model.hash_file
    monkeypatch.setattr(model, "hash_file", lambda folder, path: read.append(path) or hash_file(folder, path))
    found = model_task.run(from_source, check=True)
    assert found["complete"] and found["touched"] == 1 and read == ["model-1.safetensors"], "its bytes are right again"
    assert not model_task.run(from_source, check=False)["changed"]
    assert model_task.run(from_source, check=True)["touched"] == 0, "and known to be"


def test_weights_of_an_older_release_are_read_once(head):
    (head.path / model.SEEN).unlink()
    manifest = model.read_manifest(head.path)
    assert model.touched(head.path, manifest) == list(manifest.files)
    model.remember(head.path)
    assert model.touched(head.path, manifest) == []


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_weights_in_service_are_never_written_to(head, peer, ends):
    with serving(head, peers=2) as (pull_from, _):
        model_copy.copy(peer, pull_from, 4, quiet)
        shard = peer.path / "model-1.safetensors"
        flip(shard, 3 * PIECE)
        before = shard.read_bytes()
        with shard.open("rb") as in_service:
            if ends == "badly":
                Cut.left = 0
                with pytest.raises(ModelError, match="the head went away"):
                    model_copy.copy(peer, Cut(pull_from.address, pull_from.port, TOKEN), 1, quiet)
                assert shard.read_bytes() == before, "what is there stays where it is"
            model_copy.copy(peer, pull_from, 4, quiet)
            assert in_service.read() == before
    assert content(peer.path) == content(head.path)


def test_a_download_that_fails_leaves_the_weights_in_service(tmp_path, hub):
    python, answer = hub
    arguments = wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python))
    listing = {"files": {"config.json": [2, ""], "m.safetensors": [1, ""]}, "config": {}, "indexes": {}}
    answer(listing, {"config.json": "{}", "m.safetensors": "w"})
    model_task.run(arguments, check=False)
    place = Place(tmp_path / "root", "m", COMMIT)
    flip(place.path / "m.safetensors", 0)
    answer({"error": "ConnectError", "text": "no route"}, {})
    with pytest.raises(ModelError, match="found no way to the hub"):
        model_task.run(arguments, check=False)
    assert (place.path / "config.json").exists()


def test_what_the_hub_says_never_shows_the_token(tmp_path, hub):
    python, answer = hub
    answer({"error": "Other", "text": "Bearer hf_secret was refused"}, {})
    arguments = wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python))
    with pytest.raises(ModelError) as caught:
        model_task.run(arguments | {"token": "hf_secret"}, check=False)
    assert "Bearer <model_token> was refused" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "said"), [(401, "unknown to the hub"), (403, "found it gated"), (429, "rate limit")]
)
def test_a_refusal_by_status_has_a_remedy(tmp_path, hub, status, said):
    python, answer = hub
    answer({"error": "HfHubHTTPError", "status": status, "text": "because"}, {})
    arguments = wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python))
    with pytest.raises(ModelError, match=said):
        model_task.run(arguments, check=False)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
from ansible.module_utils.sparkpair import model, model_copy
from pathlib import Path
model.PIECE = model_copy.PIECE = int(sys.argv[4])
model.MARGIN = 0
place = model.Place(Path(sys.argv[3]), "m", "r1")
source = model_copy.Source("127.0.0.1", int(sys.argv[2]), sys.argv[5])
print("ready", flush=True)
sys.stdin.readline()
with model.hold(place):
    model_copy.copy(place, source, 2, lambda line: None)
    model.switch(place)
"""


def test_a_copy_that_is_killed_at_any_point_is_repaired_by_the_next(head, peer, monkeypatch):
    """SIGKILL at 24 random points, a third of them while damage is mended: every other one in the middle of a random
    piece, the rest at a random time from the start to the switch."""
    rng, places = random.Random(20261130), [Place(peer.root / str(n), "m", "r1") for n in range(24)]

    def start(place, port):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(port), str(place.root), str(PIECE), TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout.readline() == b"ready\n"
        return child

    send, armed = model_copy.Handler._send_part, {"pieces": 0}

    def send_or_kill(handler, *arguments):
        armed["pieces"] -= 1
        if armed["pieces"] == 0:
            armed["child"].kill()
        with contextlib.suppress(OSError):
            send(handler, *arguments)

    monkeypatch.setattr(model_copy.Handler, "_send_part", send_or_kill)
    unfinished = 0
    with serving(head, peers=1000) as (pull_from, _):
        with start(Place(peer.root / "whole", "m", "r1"), pull_from.port) as child:
            ready = time.monotonic()
            child.communicate(b"go\n", timeout=30)
        whole = time.monotonic() - ready
        assert child.returncode == 0
        for number, place in enumerate(places):
            if number % 3 == 0:
                model_copy.copy(place, pull_from, 2, quiet)
                flip(place.path / "model-1.safetensors", PIECE * (number % 5))
            before = content(place.path)
            with start(place, pull_from.port) as child:
                # One piece is to be mended, nine are to be copied.
                armed |= {"child": child, "pieces": rng.randint(1, 1 if before else 9) if number % 2 else 0}
                child.stdin.write(b"go\n")
                child.stdin.flush()
                if number % 2 == 0:
                    threading.Event().wait(rng.uniform(0, whole))
                    child.kill()
                child.wait(30)
            armed["pieces"] = 0
            unfinished += child.returncode != 0
            assert content(place.path) in ({}, before, content(head.path)), "never half of it"
            manifest = model.read_manifest(place.path)
            assert manifest is None or {f.path for f in manifest.files} == set(content(place.path))
            assert not place.link.is_symlink() or (place.link / "config.json").exists()
            model_copy.copy(place, pull_from, 2, quiet)
            model.switch(place)
            assert content(place.link) == content(head.path)
    assert unfinished >= 12, "those that were to die in a piece did"


def test_weights_from_nowhere_are_refused(tmp_path):
    with pytest.raises(ModelError, match="set model_repo"):
        model_task.run(wish(tmp_path / "root", state="present"), check=False)


FAKE_HUB = """#!{python}
import json, os, pathlib, sys
wish = json.loads(sys.argv[4])
answer = json.loads(pathlib.Path({answers!r}).read_text())
assert "hf_secret" not in " ".join(sys.argv)
pathlib.Path({answers!r} + ".token").write_text(os.environ.get("HF_TOKEN", "none"))
if "snapshot_download" in sys.argv[3]:
    for name, text in answer["content"].items():
        path = pathlib.Path(wish["folder"]) / name
        path.unlink(missing_ok=True)
        path.write_text(text)
    print(json.dumps({{"done": True}}))
else:
    print("noise")
    print(json.dumps(answer["list"]))
"""


@pytest.fixture
def hub(tmp_path):
    """A stand-in for the environment's Python with huggingface_hub; returns (path, set the answers)."""
    python, answers = tmp_path / "python", tmp_path / "answers"
    python.write_text(FAKE_HUB.format(python=sys.executable, answers=str(answers)))
    python.chmod(0o755)

    def answer(listing, files):
        answers.write_text(json.dumps({"list": listing, "content": files}))

    return python, answer


def test_a_download_is_compared_with_what_the_hub_lists(tmp_path, hub):
    python, answer = hub
    weights = hashlib.sha256(b"w").hexdigest()
    files = {"config.json": [2, ""], "m.safetensors": [1, weights]}
    listing = {"files": files, "config": {}, "indexes": {}}
    arguments = wish(
        tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python), token="hf_secret"
    )

    answer(listing, {"config.json": "{}", "m.safetensors": "x"})
    with pytest.raises(ModelError, match=r"1 file\(s\) other than the hub lists, first m\.safetensors"):
        model_task.run(arguments, check=False)
    place = Place(tmp_path / "root", "m", COMMIT)
    assert not place.path.exists()
    assert not (place.partial / "m.safetensors").exists()
    assert (place.partial / "config.json").exists()

    answer(listing, {"m.safetensors": "w"})
    assert model_task.run(arguments, check=False)["changed"]
    assert (tmp_path / "answers.token").read_text() == "hf_secret"
    assert model.read_manifest(place.path).origin == f"o/r@{COMMIT}"
    assert not model_task.run(arguments, check=False)["changed"]


@pytest.mark.parametrize(("name", "remedy"), sorted(model_hub.REMEDIES.items()))
def test_what_the_hub_refuses_has_a_remedy(tmp_path, hub, name, remedy):
    python, answer = hub
    answer({"error": name, "text": "because"}, {})
    with pytest.raises(ModelError) as caught:
        model_task.run(
            wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python)), check=False
        )
    assert remedy in str(caught.value)
    assert f"o/r at {COMMIT}" in str(caught.value)


def test_the_scripts_for_the_hub_are_python():
    for script in (model_hub._LIST, model_hub._DOWNLOAD):
        compile(script, "script", "exec")


def test_a_repository_without_a_model_is_refused_before_the_download(tmp_path, hub):
    python, answer = hub
    answer({"files": {"README.md": [1, ""]}, "config": {}, "indexes": {}}, {})
    with pytest.raises(ModelError, match=r"no config\.json in o/r"):
        model_task.run(
            wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT, python=str(python)), check=False
        )


def test_a_missing_environment_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"run playbooks/vllm_env\.yml first"):
        model_task.run(wish(tmp_path / "root", state="present", repo="o/r", revision=COMMIT), check=False)


def test_the_tiny_model_is_the_same_everywhere_and_usable(tmp_path):
    first, second = tiny_model.build(tmp_path / "a"), tiny_model.build(tmp_path / "b")
    assert content(first) == content(second)
    digest = hashlib.sha256((first / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "40155faa04f6bc128791cefebb4afa40ced2f490e6c08ab01a4c33c4624bf280"
    model.require_usable(first, model.list_files(first))
    config = json.loads((first / "config.json").read_text())
    for part in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[part] % 2 == 0, f"two ranks cannot share {part}"


def test_the_tiny_models_tensors_are_what_its_header_says(tmp_path):
    data = (tiny_model.build(tmp_path / "a") / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    end = 0
    for entry in header.values():
        count = 1
        for n in entry["shape"]:
            count *= n
        assert entry["data_offsets"] == [end, end + 4 * count]
        end += 4 * count
    assert len(data) == 8 + length + end
    assert len(header) == 3 + 9 * tiny_model.LAYERS


def test_the_byte_alphabet_covers_every_byte_once():
    alphabet = tiny_model.byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("a")] == "a"
    assert alphabet[ord(" ")] == "\u0120"
    assert Path(tiny_model.__file__).name == "tiny_model.py"
