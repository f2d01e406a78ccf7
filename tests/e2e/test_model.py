"""Weights of a pair that serves: from a simulated hub to the head, over the fabric to the worker, damage mended."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT, play
from fabric_lab import root
from test_demo import changed, recap

HUB = (ROOT / "tests" / "hub" / "simulated_hub.py").read_text()
PORT = 8999
TOKEN = "hf_a_secret_of_the_tests"
# As in the simulated hub.
MODEL = {
    "model_name": "from-hub",
    "model_repo": "simulated/model",
    "model_source": "",
    "model_revision": "0123456789abcdef0123456789abcdef01234567",
    "model_token": TOKEN,
    "model_environment": {"HF_ENDPOINT": f"http://127.0.0.1:{PORT}"},
}
WEIGHTS = f"/var/lib/sparkpair/models/from-hub/{MODEL['model_revision']}/model.safetensors"


@pytest.fixture
def hub(fresh_lab):
    """A pair that serves, and a hub on the head's loopback that has the lab's model."""
    play("site.yml")
    root("spark-a", f"cat >/srv/simulated_hub.py <<'EOF'\n{HUB}\nEOF")
    root("spark-a", f"systemd-run -q --unit=simulated-hub python3 /srv/simulated_hub.py /srv/model {PORT}; sleep 1")
    yield
    root("spark-a", "systemctl stop simulated-hub; rm /srv/simulated_hub.py")
    play("playbooks/model.yml")
    for node in ("spark-a", "spark-b"):
        root(node, "rm -r /var/lib/sparkpair/models/from-hub")


def sums():
    return {root(node, f"sha256sum <{WEIGHTS}") for node in ("spark-a", "spark-b")}


def test_weights_come_from_a_hub_once_and_damage_is_mended(hub):
    wish = json.dumps(MODEL)
    output = play("playbooks/model.yml", "-vvv", "-e", wish)
    shown = output.replace(wish, "")
    assert TOKEN not in shown and "the model fits with" in output
    whole = sums()
    assert len(whole) == 1
    assert changed(play("playbooks/model.yml", "-e", wish)) == {0}
    assert changed(play("playbooks/model.yml", "--check", "--diff", "-e", wish)) == {0}

    root("spark-b", f"printf x | dd of={WEIGHTS} bs=1 seek=5000 conv=notrunc status=none")
    assert len(sums()) == 2
    counts = recap(play("playbooks/model.yml", "-e", wish))
    assert counts["spark-a"]["changed"] == 0 and counts["spark-b"]["changed"] > 0, counts
    assert sums() == whole

    output = play("playbooks/model.yml", "-e", wish, "-e", "model_revision=" + "f" * 40, check=False)
    assert "spark-a: simulated/model at " + "f" * 40 + ": found no such commit" in output
    output = play(
        "playbooks/model.yml", "-e", wish, "-e", '{"serve_engine_args": {"max-model-len": "900M"}}', check=False
    )
    assert "expected" in output and "lower max-model-len in serve_engine_args to" in output
    assert sums() == whole
