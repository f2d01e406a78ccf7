"""Back to the environment that served before, and forward again, with everything that belonged to it."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from ansible.module_utils.sparkpair import digests, environment, release

FIRST, SECOND = "1" * 16, "2" * 16


@pytest.fixture
def places(tmp_path):
    """A node on which two environments served, the second one last."""
    made = release.Places(
        tmp_path / "root", tmp_path / "releases", tmp_path / "caches",
        (str(tmp_path / "root/current"), str(tmp_path / "models/current")), str(tmp_path / "etc/rank.env"),
    )  # fmt: skip
    (tmp_path / "etc").mkdir()
    for number, name in enumerate((FIRST, SECOND)):
        install(made, name, patched=number == 1)
        serve(made, name, number)
        os.utime(made.releases / f"{name}.json", (number, number))
    return made


def install(places, name, patched):
    env = places.root / "envs" / name
    folder = env / "lib/python3.12/site-packages" / digests.SCHEDULER
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text(f"stock {name}")
    (env / "bin").mkdir()
    (env / "bin/python").symlink_to("/usr/bin/python3")
    environment.record(env)
    (env / environment.MANIFEST).write_text(json.dumps({"digest": name}))
    if patched:
        known = next(line for line in environment.read_record(env) if line.path.endswith("scheduler.py"))
        (folder / f"scheduler.py.{known.sha256[:16]}.orig").write_text(f"stock {name}")
        (folder / "scheduler.py").write_text(f"patched {name}")
    (places.root.parent / "models" / f"tiny/{name}").mkdir(parents=True)


def names(places):
    etc = places.root.parent / "etc"
    return [str(etc / name) for name in ("agent.json", "rank.env")]


def serve(places, name, cap):
    """What the stages do for an environment."""
    for link, target in zip(places.links, (f"envs/{name}", f"tiny/{name}"), strict=True):
        path = release.Path(link)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    agent, settings = map(release.Path, names(places))
    agent.write_text(f"agent of {name}")
    settings.write_text(
        f'DSPARK_CAP="{cap}"\nSPARKPAIR_PAIR_DIGEST="p{cap}"\nSPARKPAIR_SERVES="x"\nHF_TOKEN="secret"\n'
    )
    settings.chmod(0o600)
    (places.caches / release.serves_of(places.root / "envs" / name) / "triton").mkdir(parents=True, exist_ok=True)
    assert release.save(names(places), places, check=True)
    assert release.save(names(places), places, check=False)
    assert not release.save(names(places), places, check=False)


def test_back_and_forward_again_with_settings_model_hotfix_and_caches(places):
    file = release.choose("", places)
    assert file.stem == FIRST
    _, predicted = release.restore(file, places, check=True)
    assert predicted == [*sorted(places.links), *names(places)], "the settings come last"
    assert release.Path(places.links[0]).readlink().name == SECOND
    back, changed = release.restore(file, places, check=False)
    assert changed == predicted
    assert (back.env, back.patched) == (FIRST, False)
    assert back.variables(places.settings) == {"DSPARK_CAP": "0", "SPARKPAIR_PAIR_DIGEST": "p0"}
    assert release.Path(places.links[0]).readlink() == release.Path(f"envs/{FIRST}")
    assert release.Path(places.links[1]).readlink() == release.Path(f"tiny/{FIRST}")
    agent, settings = map(release.Path, names(places))
    assert agent.read_text() == f"agent of {FIRST}"
    assert settings.stat().st_mode & 0o777 == 0o600
    assert not release.save(names(places), places, check=False), "what is back in service is kept already"
    forward, _ = release.restore(release.choose("", places), places, check=False)
    assert (forward.env, forward.patched) == (SECOND, True)
    assert release.choose(FIRST, places).stem == FIRST
    assert len(list(places.caches.iterdir())) == 2


def test_what_is_kept_may_hold_secrets(places):
    assert places.releases.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in places.releases.iterdir()} == {0o600}


def test_caches_and_files_of_environments_that_are_gone_go_and_others_stay(places):
    (places.caches / "not-ours").mkdir()
    (places.caches / f"{SECOND}-0123456789ab").mkdir()  # of an earlier state of the hotfix
    shutil.rmtree(places.root / "envs" / FIRST)
    assert release.save(names(places), places, check=True)
    assert len(list(places.caches.iterdir())) == 4
    assert release.save(names(places), places, check=False)
    serves = release.serves_of(places.root / "envs" / SECOND)
    assert sorted(path.name for path in places.caches.iterdir()) == sorted([serves, "not-ours"])
    assert [file.stem for file in places.releases.iterdir()] == [SECOND]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p: shutil.rmtree(p.root / "envs" / FIRST), "it is gone"),
        (lambda p: (p.root / "envs" / FIRST / "six.py").touch(), "added six.py"),
        (lambda p: shutil.rmtree(p.root.parent / "models/tiny" / FIRST), "found no "),
        (lambda p: (p.releases / f"{FIRST}.json").write_text("{}"), "cannot be read"),
        (lambda p: (p.releases / f"{FIRST}.json").unlink(), "found no other environment that served before"),
    ],
)
def test_what_cannot_serve_again_is_refused_before_anything_changes(places, act, words):
    act(places)
    with pytest.raises(release.ReleaseError, match=words):
        release.choose("", places)
    assert release.Path(places.links[0]).readlink().name == SECOND


def test_an_environment_that_never_served_is_named(places):
    with pytest.raises(release.ReleaseError, match=f"found no environment abc .*kept: {SECOND}, {FIRST}"):
        release.choose("abc", places)


def test_another_scheduler_than_served_is_refused(places):
    release.restore(release.choose("", places), places, check=False)
    (scheduler,) = (places.root / "envs" / SECOND).rglob("scheduler.py")
    scheduler.write_text("patched otherwise")
    with pytest.raises(release.ReleaseError, match="found environment and scheduler"):
        release.choose("", places)
