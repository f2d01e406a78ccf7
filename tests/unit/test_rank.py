"""What is read of a rank: properties, processes, the cap that its scheduler logged, digests of what it serves."""

from __future__ import annotations

from ansible.module_utils.sparkpair import digests, rank


def test_properties_keep_values_with_equal_signs():
    assert rank.parse_properties("ActiveState=active\nEnvironment=A=1\n\n") == {
        "ActiveState": "active",
        "Environment": "A=1",
    }


def test_processes_of_a_cgroup_and_below(tmp_path):
    (tmp_path / "child").mkdir()
    (tmp_path / "cgroup.procs").write_text("1\n2\n")
    (tmp_path / "child" / "cgroup.procs").write_text("3\n")
    assert sorted(rank.process_ids(tmp_path)) == [1, 2, 3]
    assert rank.process_ids(tmp_path / "gone") == []


def test_a_process_shows_only_the_variables_that_are_asked_for(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"VLLM::Worker_TP1\0\0")
    (tmp_path / "7" / "environ").write_bytes(b"INVOCATION_ID=1\0DSPARK_MAX_INFLIGHT_PREFILLS=2\0VLLM_API_KEY=secret\0")
    found = rank.read_process(7, ["DSPARK_"], tmp_path)
    assert found == {"pid": 7, "name": "VLLM::Worker_TP1", "env": {"DSPARK_MAX_INFLIGHT_PREFILLS": "2"}}
    (tmp_path / "7" / "environ").write_bytes(b"1\0\0\0")
    assert rank.read_process(7, ["DSPARK_"], tmp_path)["env"] is None
    assert rank.read_process(8, ["DSPARK_"], tmp_path) is None


def make_env(root, digest, text):
    folder = root / "envs" / digest / "lib" / "python3.12" / "site-packages" / digests.SCHEDULER
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text(text)
    (folder.parents[3] / "vllm-0.33.0.dist-info").mkdir()
    (root / "current").unlink(missing_ok=True)
    (root / "current").symlink_to(root / "envs" / digest)


def test_digests_follow_the_links_and_the_scheduler(tmp_path):
    model = tmp_path / "models" / "tiny" / "r1"
    model.mkdir(parents=True)
    (tmp_path / "models" / "current").symlink_to(model)
    make_env(tmp_path, "aaaa", "stock")
    before = digests.read_digests(tmp_path, tmp_path / "models" / "current")
    assert (before["env"], before["model"]) == ("aaaa", "tiny/r1")
    assert rank.read_vllm_version(tmp_path) == "0.33.0"
    (model / "sparkpair-model.json").write_text('{"digest": "0123456789abcdef"}')
    assert digests.read_digests(tmp_path, tmp_path / "models" / "current")["model"] == "tiny/r1 0123456789ab"
    make_env(tmp_path, "bbbb", "patched")
    after = digests.read_digests(tmp_path, tmp_path / "models" / "current")
    assert after["env"] == "bbbb" and after["scheduler"] != before["scheduler"]


def test_a_fresh_node_has_empty_digests(tmp_path):
    assert not any(digests.read_digests(tmp_path, tmp_path / "no").values())
    assert rank.read_vllm_version(tmp_path) == ""


def test_processes_that_run_with_other_settings_are_named():
    processes = [
        {"pid": 7, "name": "vllm", "env": {"A": "1"}},
        {"pid": 8, "name": "worker", "env": {}},
        {"pid": 9, "name": "renamed", "env": None},
    ]
    (fault,) = rank.expected_differences({"A": "1"}, processes)
    assert "A=<unset>" in fault and "expected 1" in fault
