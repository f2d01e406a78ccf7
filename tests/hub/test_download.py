"""The download with the real huggingface_hub, against a simulated hub on loopback: done, gone on with, refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible.module_utils.sparkpair import model, model_task
from ansible.module_utils.sparkpair.model import ModelError, Place
from simulated_hub import COMMIT, REPO, SimulatedHub

PYTHON = Path(__file__).parents[2] / ".cache" / "vllm-venv" / "bin" / "python"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TOKEN = "hf_a_secret_of_the_tests"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("A model.")
    for name in SHARDS:
        (folder / name).write_bytes(random.Random(name).randbytes(300_000))
    index = {"weight_map": {f"layer.{n}": name for n, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.pth").write_bytes(bytes(2000))
    hub = SimulatedHub(folder)
    hub.start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(model, "MARGIN", 0)
    yield hub
    hub.stop()


@pytest.fixture
def wish(tmp_path):
    """The module's arguments on a head, with changes."""
    assert PYTHON.exists(), "make vllm-venv"

    def arguments(**changes):
        base = {
            "node": "spark-a", "state": "present", "root": str(tmp_path / "root"), "name": "m", "revision": COMMIT,
            "source": "", "repo": REPO, "token": "", "ignore": ["original/*"], "python": str(PYTHON), "verify": False,
            "address": "", "port": 0, "secret": "", "peers": 0, "streams": 2, "log": str(tmp_path / "model.log"),
        }  # fmt: skip
        return base | changes

    return arguments


@pytest.fixture
def run(wish):
    """Run the module's work; returns its result."""
    return lambda state="present", check=False, **changes: model_task.run(wish(state=state, **changes), check=check)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "root", "m", COMMIT)


def same(place, hub):
    names = [name for name in hub.names() if not name.startswith("original/")]
    return {n: (place.path / n).read_bytes() for n in names} == {n: (hub.folder / n).read_bytes() for n in names}


def test_a_download_is_complete_proven_and_not_repeated(hub, run, place):
    assert run()["changed"]
    assert same(place, hub)
    assert not (place.path / "original").exists()
    assert model.read_manifest(place.path).origin == f"{REPO}@{COMMIT}"
    hub.requests.clear()
    assert not run()["changed"]
    assert hub.requests == [], "what is complete needs no hub"


def test_what_a_model_takes_is_known_before_a_shard_is_fetched(hub, run, place):
    listing = run("listed", check=True)["listing"]
    assert listing["weights"] == 600_000
    assert listing["size"] == sum((hub.folder / n).stat().st_size for n in hub.names() if "original" not in n)
    assert listing["config"] == {"model_type": "llama", "num_hidden_layers": 2}
    assert not any(hub.gets(name) for name in SHARDS)
    assert not place.root.exists()


def test_a_connection_that_breaks_is_gone_on_with(hub, run, place):
    (hub.folder / SHARDS[1]).write_bytes(random.Random(1).randbytes(24 << 20))
    hub.cuts = {SHARDS[1]: 11 << 20}
    run()
    assert same(place, hub)
    # The client writes pieces of 10 MiB.
    assert hub.gets(SHARDS[1]) == ["", f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


KILLED = """
import runpy, sys, json
runpy.run_path(sys.argv[1])
from ansible.module_utils.sparkpair import model, model_task
model.MARGIN = 0
model_task.run(json.loads(sys.argv[2]), check=False)
"""


def test_a_download_that_is_killed_ends_at_once_and_keeps_what_is_finished(hub, run, place, wish):
    hub.stalled = {SHARDS[1]: threading.Event()}
    command = [sys.executable, "-c", KILLED, str(Path(__file__).with_name("conftest.py")), json.dumps(wish())]
    with subprocess.Popen(command) as module:
        wait_for(lambda: hub.gets(SHARDS[1]) and (place.partial / SHARDS[0]).exists())
        client = next(line for line in children(module.pid))
        module.kill()
    wait_for(lambda: not Path(f"/proc/{client}").exists(), "the client ends with the module")
    hub.stalled[SHARDS[1]].set()
    assert not place.path.exists()
    hub.requests.clear()
    run()
    assert same(place, hub)
    assert hub.gets(SHARDS[0]) == [] and hub.gets(SHARDS[1]) == [""]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_for(condition, what="the download runs"):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(what)


def test_a_revision_that_is_not_there_is_named(hub, run, place):
    with pytest.raises(ModelError) as caught:
        run(revision="f" * 40)
    assert str(caught.value).startswith(f"{REPO} at {'f' * 40}: found no such commit, expected one of the repository")


@pytest.mark.parametrize("token", ["", "hf_of_somebody_else_entirely"])
def test_a_gated_repository_says_what_to_do_and_never_shows_the_token(hub, run, place, tmp_path, token):
    hub.token = TOKEN
    with pytest.raises(ModelError, match="found it gated, expected access: accept its terms") as caught:
        run(token=token)
    assert not token or token not in str(caught.value)
    run(token=TOKEN)
    assert same(place, hub)
    assert hub.tokens - {f"Bearer {token}"} == {f"Bearer {TOKEN}"}
    assert TOKEN not in (tmp_path / "model.log").read_text()
    assert all(TOKEN.encode() not in p.read_bytes() for p in place.root.rglob("*") if p.is_file())


def test_a_repository_that_is_not_there_is_named(hub, run):
    with pytest.raises(ModelError, match="found no such repository for this token"):
        run(repo="simulated/other")


def test_a_file_that_is_not_there_is_named(hub, run, place):
    hub.missing = {SHARDS[1]}
    with pytest.raises(ModelError, match="found a listed file missing, expected it at this commit"):
        run()
    assert not place.path.exists()
    hub.missing = set()
    run()
    assert same(place, hub)
    assert len(hub.gets(SHARDS[0])) == 1


def test_a_checksum_that_differs_is_found_and_that_file_alone_is_fetched_again(hub, run, place):
    lie = bytearray((hub.folder / SHARDS[0]).read_bytes())
    lie[1234] ^= 1
    hub.lies = {SHARDS[0]: bytes(lie)}
    with pytest.raises(ModelError, match=rf"found 1 file\(s\) other than the hub lists, first {SHARDS[0]} \(sha256"):
        run()
    assert not place.path.exists()
    hub.lies, hub.requests = {}, []
    run()
    assert same(place, hub)
    assert len(hub.gets(SHARDS[0])) == 1 and hub.gets(SHARDS[1]) == []


def test_a_damaged_shard_is_found_and_it_alone_is_fetched_again(hub, run, place):
    run()
    shard = place.path / SHARDS[1]
    damaged = bytearray(shard.read_bytes())
    damaged[77] ^= 1
    shard.write_bytes(bytes(damaged))
    hub.requests.clear()
    assert run()["changed"]
    assert same(place, hub)
    assert hub.gets(SHARDS[0]) == [] and len(hub.gets(SHARDS[1])) == 1


def test_a_shard_that_the_index_names_and_nobody_has_is_refused_before_the_download(hub, run, place):
    (hub.folder / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=rf"without 1 of the 2 shards of its index, first {SHARDS[1]}"):
        run()
    assert not any(hub.gets(name) for name in SHARDS)
    assert not place.path.exists()


def test_a_hub_that_cannot_be_reached_is_named(hub, run, monkeypatch):
    hub.stop()
    with pytest.raises(ModelError, match="found no way to the hub, expected one: set a proxy or a mirror"):
        run()


def test_no_space_is_said_before_a_shard_is_fetched(hub, run, monkeypatch):
    monkeypatch.setattr(model, "MARGIN", 1 << 60)
    with pytest.raises(ModelError, match=r"GB free for .*, expected .* GB for the weights"):
        run()
    assert not any(hub.gets(name) for name in SHARDS)
