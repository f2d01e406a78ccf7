"""The table of events and what an agent does, row by row, with fake processes and a fake clock."""

from __future__ import annotations

import pytest
from agent_world import SAME, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sparkpair_rank import core


def spawned(world: World, rank: int) -> list[int]:
    return [action.generation for _, action in world.nodes[rank].actions if isinstance(action, core.Spawn)]


def logs(world: World) -> str:
    return "\n".join(action.text for _, action in world.nodes[0].actions if isinstance(action, core.Log))


@pytest.fixture
def world() -> World:
    made = World()
    made.until_serving()
    return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_worker_ranks_start_first_rank_0_last(ranks):
    world = World(ranks)
    world.until_serving()
    first = {rank: next(t for t, a in world.nodes[rank].actions if isinstance(a, core.Spawn)) for rank in range(ranks)}
    assert all(first[rank] < first[0] for rank in range(1, ranks))
    assert all(spawned(world, rank) == [1] for rank in range(ranks))


def test_ready_is_told_once_and_only_after_a_completion_and_the_warm_up():
    world = World()
    world.answers["ready"] = "refused"
    world.run(20)
    told = [action for node in world.nodes for _, action in node.actions if isinstance(action, core.Ready)]
    assert not told and world.head.phase == core.LOADING
    world.answers["ready"] = "ok"
    world.until_serving()
    world.run(1)
    world.die(1)
    world.run(20)
    assert world.serving()
    for node in world.nodes:
        assert sum(isinstance(action, core.Ready) for _, action in node.actions) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_dies_and_all_ranks_stop_within_two_seconds_then_a_new_generation_starts(world, rank):
    world.die(rank)
    world.run(2)
    assert 1 not in set().union(*world.alive())
    took = world.until_serving()
    assert took < 5 and spawned(world, 0) == spawned(world, 1) == [1, 2]
    assert "ended by signal 9" in logs(world)


def test_one_rail_cut_changes_nothing(world):
    world.cut = {(1, 0)}
    world.run(60)
    assert world.serving() and spawned(world, 0) == [1]


def test_both_rails_cut_stop_both_ranks_within_ten_seconds_and_they_resume(world):
    world.cut = {(1, 0), (1, 1)}
    world.run(9.9)
    assert world.alive() == [set(), set()]
    assert "spark-b: not heard" in world.head.text(world.now)
    world.run(60)
    world.cut = set()
    assert world.until_serving() < 10
    assert not world.head.crashes, "a lost node is no crash"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_is_killed_and_the_pair_comes_back(world, rank):
    world.crash(rank)
    world.run(2)
    assert world.alive() == [set(), set()]
    world.boot(rank)
    world.until_serving()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_loses_power_and_the_pair_comes_back(world, rank):
    world.crash(rank, tell=False)
    world.run(9)
    assert world.alive() == [set(), set()]
    world.boot(rank)
    world.until_serving()


def test_both_nodes_boot_at_once(world):
    for rank in (0, 1):
        world.crash(rank, tell=False)
    world.run(3)
    for rank in (1, 0):
        world.boot(rank)
    world.until_serving()


def wedge(world: World) -> None:
    world.metrics = (1, "frozen")
    world.answers["canary"] = "late"


def test_a_wedged_engine_gets_a_new_generation_with_evidence_from_all_ranks(world):
    wedge(world)
    world.run(world.limits.quiet * 3)
    world.answers["canary"] = "ok"
    for node in world.nodes:
        (kill,) = [action for _, action in node.actions if isinstance(action, core.Kill)]
        assert kill.evidence and not kill.graceful
    world.until_serving()
    assert "wedged: nothing moved" in logs(world)


def test_an_idle_pair_is_asked_now_and_then_so_that_a_dead_one_is_found_before_a_user_does(world):
    world.answers["canary"] = "late"
    world.run(world.limits.canary + world.limits.quiet + 10)
    assert "wedged" in logs(world)


def test_tokens_that_advance_are_no_wedge(world):
    """A full KV cache or a long prefill: the canary is late, but numbers move."""
    world.answers["canary"] = "late"
    for i in range(400):
        world.metrics = (64, str(i))
        world.run(1)
    assert world.serving() and spawned(world, 0) == [1]


def test_a_compiler_at_work_is_no_wedge_until_it_takes_too_long(world):
    wedge(world)
    world.nodes[1].compiling = True
    world.run(600)
    assert world.serving() and spawned(world, 0) == [1]
    world.run(1200)
    assert "wedged" in logs(world)


def test_a_crash_loop_backs_off_and_ends_with_the_first_cause():
    world = World()
    starts = []
    for i in range(5):
        world.run(100)
        if not world.nodes[1].alive:
            break
        starts.append(world.now)
        world.die(1, f"ValueError: fault {i}", weight=0, at=10.0 + i)
        world.die(0, "RuntimeError: NCCL error: unhandled system error", weight=2, at=1.0)
    world.run(3600)
    assert world.head.phase == core.FAILED and world.alive() == [set(), set()]
    assert spawned(world, 0) == [1, 2, 3, 4, 5]
    assert "the first because of: ValueError: fault 0" in world.head.text(world.now)
    waits = [b - a for a, b in zip(spawn_times(world), spawn_times(world)[1:], strict=False)]
    assert waits
    world.give(0, core.Command("restart"))
    world.until_serving()


def spawn_times(world: World) -> list[float]:
    return [at for at, action in world.nodes[1].actions if isinstance(action, core.Spawn)]


def test_restarts_wait_longer_and_longer():
    world = World()
    gaps = []
    for _ in range(4):
        world.until_serving(200)
        world.die(1)
        died = world.now
        world.run(0.2)
        while not world.nodes[1].alive or world.nodes[1].dying:
            world.step()
        gaps.append(world.now - died)
    assert gaps[0] < 2 and gaps == sorted(gaps) and gaps[3] > 7


def test_the_first_exception_wins_over_the_noise_of_peers(world):
    world.die(0, "gloo: Connection closed by peer", weight=2, at=1.0)
    world.give(1, core.Died(1, core.Cause("ValueError: Free memory on device", 3.0, 0)))
    world.until_serving()
    assert world.head.crashes[0].cause.text == "ValueError: Free memory on device"


def test_a_hold_on_any_node_means_no_probe_and_no_restart(world):
    world.nodes[1].hold = "fatal PCIe errors on enp1s0f0np0: power-cycle the node"
    before = len([1 for _, action in world.nodes[0].actions if isinstance(action, core.Probe)])
    wedge(world)
    world.run(300)
    assert world.serving(), "a hold stops nothing"
    assert len([1 for _, action in world.nodes[0].actions if isinstance(action, core.Probe)]) == before
    world.die(0)
    world.run(60)
    assert world.alive() == [set(), set()]
    assert "held on spark-b: fatal PCIe errors" in world.head.text(world.now)
    world.nodes[1].hold = ""
    world.answers["canary"] = "ok"
    world.until_serving()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_on_any_node_drains_stops_all_and_lasts(world, rank):
    world.metrics = (3, "a")
    world.give(rank, core.Command("leave"))
    world.run(5)
    assert all(node.alive for node in world.nodes), "requests in flight are waited for"
    assert sum(isinstance(action, core.Refuse) for _, action in world.nodes[0].actions) == 1, "no new ones are taken"
    world.metrics = (0, "b")
    world.run(3)
    assert world.alive() == [set(), set()] and world.nodes[rank].agent is None
    world.run(120)
    assert world.alive() == [set(), set()]
    for number, node in enumerate(world.nodes):
        kills = [action.graceful for _, action in node.actions if isinstance(action, core.Kill)]
        assert kills == [number == 0], "the head finishes; a worker has nothing to finish"
    if rank == 1:
        assert "spark-b: stopped there" in world.head.text(world.now)
    world.boot(rank)
    world.until_serving()


def test_a_drain_ends_at_its_bound(world):
    world.metrics = (3, "a")
    world.give(1, core.Command("leave"))
    world.run(world.limits.drain + 3)
    assert world.alive() == [set(), set()] and world.nodes[1].agent is None


def test_both_told_to_stop_at_once_end(world):
    for rank in (0, 1):
        world.give(rank, core.Command("leave"))
    world.run(5)
    assert [node.agent for node in world.nodes] == [None, None]


def test_a_worker_leaves_although_the_leader_is_gone(world):
    world.crash(0)
    world.run(1)
    world.give(1, core.Command("leave"))
    world.run(3)
    assert world.nodes[1].agent is None


def test_digests_that_differ_are_named_and_nothing_starts():
    world = World()
    world.nodes[1].digests = {**SAME, "scheduler": "s2"}
    world.boot(1)
    world.run(30)
    assert world.alive() == [set(), set()]
    assert world.head.text(world.now).startswith(
        "waiting for spark-b: scheduler digest differs: s2 there, s1 on spark-a"
    )
    world.nodes[1].digests = dict(SAME)
    world.until_serving()


def test_packages_that_differ_are_named_before_any_digest():
    world = World()
    world.nodes[0].digests = {**SAME, "env": "e1", "packages": "aiohttp 3.14.5, torch 2.14.0, vllm 0.33.0"}
    world.nodes[1].digests = {**SAME, "env": "e2", "packages": "aiohttp 3.14.5, six 1.17.0, torch 2.13.0, vllm 0.33.0"}
    world.boot(1)
    world.run(10)
    assert world.head.text(world.now).startswith(
        "waiting for spark-b: packages differ: six 1.17.0, torch 2.13.0 there, torch 2.14.0 on spark-a"
    )
    assert "packages" not in world.head.summary(world.now)["digests"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_unfit_stops_all_also_when_both_are_alike(rank):
    world = World()
    world.boot(1)
    for node in world.nodes[rank:]:
        node.digests = {**SAME, core.UNFIT: "found 1 files that differ"}
    world.run(30)
    assert world.alive() == [set(), set()]
    assert f"not started, {world.nodes[rank].agent.names[rank]}: found 1 files that differ" in world.head.text(
        world.now
    )
    for node in world.nodes:
        node.digests = {}
    world.run(5)
    assert "reading what spark-a would serve" in world.head.text(world.now)
    for node in world.nodes:
        node.digests = dict(SAME)
    world.until_serving()


def test_a_start_that_takes_too_long_is_a_failure():
    world = World(limits=core.Limits(ready=30))
    world.answers["ready"] = "refused"
    world.run(40)
    assert len(world.head.crashes) == 1
    assert "no completion within 30 s" in world.head.crashes[0].cause.text


def test_a_restart_by_command_is_one_graceful_generation(world):
    world.give(0, core.Command("restart"))
    world.run(2)
    world.until_serving()
    assert spawned(world, 0) == spawned(world, 1) == [1, 2] and not world.head.crashes


def test_late_results_of_an_old_generation_are_ignored(world):
    world.die(0)
    world.until_serving()
    world.give(0, core.Probed(1, "canary", "broken", "old"))
    world.give(0, core.Died(1, core.Cause("old", 0.0)))
    world.give(0, core.Gone(1))
    world.run(5)
    assert spawned(world, 0) == [1, 2]


@pytest.mark.parametrize("late", [0.5, 1.0, 2.0, 3.0])
def test_an_old_status_that_says_stopped_starts_nothing(late):
    """Rank 1 is far away: what the leader knows of it is old. Rank 2 dies as soon as it starts, again and again."""
    world = World(3, stop_takes=1.5)
    world.slow = {1: late}
    for _ in range(600):
        world.step()
        if world.nodes[2].alive and len(world.head.crashes) < 3:
            world.die(2)
    world.head.crashes.clear()
    world.until_serving(120)


def test_a_worker_that_lost_the_leader_while_others_start_ends_that_generation():
    """It never starts the same generation again: waiting for it would take the whole bound of a start."""
    world = World(3, stop_takes=0.1)
    world.slow = {2: 2.0}
    while not world.nodes[1].alive:
        world.step()
    world.give(1, core.Closed(0))
    world.until_serving(30)


class Faults(RuleBasedStateMachine):
    """Crashes, cuts, delays and stops in any order. Two generations are never alive together, and well nodes serve."""

    @initialize(ranks=st.integers(2, 3), stop=st.sampled_from([0.1, 1.5]))
    def begin(self, ranks, stop):
        self.world = World(ranks, stop_takes=stop)
        self.ranks = ranks

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0, 7.0, 20.0]))
    def time(self, seconds):
        self.world.run(seconds)

    @rule(rank=st.integers(0, 2))
    def process_dies(self, rank):
        self.world.die(rank % self.ranks)

    @rule(rank=st.integers(0, 2), tell=st.booleans())
    def agent_dies(self, rank, tell):
        if self.world.nodes[rank % self.ranks].agent:
            self.world.crash(rank % self.ranks, tell)

    @rule(rank=st.integers(0, 2))
    def agent_boots(self, rank):
        if self.world.nodes[rank % self.ranks].agent is None:
            self.world.boot(rank % self.ranks)

    @rule(rank=st.integers(1, 2), rail=st.integers(0, 1))
    def cut(self, rank, rail):
        self.world.cut ^= {((rank - 1) % (self.ranks - 1) + 1, rail)}

    @rule(slow=st.sampled_from([0.01, 0.5, 3.0]), rail=st.integers(0, 1))
    def delay(self, slow, rail):
        self.world.delays[rail] = slow

    @rule(rank=st.integers(1, 2), late=st.sampled_from([0.0, 0.7, 2.5]))
    def far(self, rank, late):
        self.world.slow[rank] = late

    @rule(rank=st.integers(0, 2))
    def start_and_die_at_once(self, rank):
        before = self.world.nodes[rank % self.ranks].alive
        for _ in range(30):
            self.world.step()
            if self.world.nodes[rank % self.ranks].alive - before:
                return self.world.die(rank % self.ranks)
        return None

    @rule(kind=st.sampled_from(["ready", "warmup", "canary"]), answer=st.sampled_from(["ok", "late", "broken"]))
    def answers(self, kind, answer):
        self.world.answers[kind] = answer

    @rule(rank=st.integers(0, 2))
    def told_to_stop(self, rank):
        self.world.give(rank % self.ranks, core.Command("leave"))

    @rule(rank=st.integers(0, 2), hold=st.sampled_from(["", "paused"]))
    def hold(self, rank, hold):
        self.world.nodes[rank % self.ranks].hold = hold

    @rule(rank=st.integers(0, 2), digest=st.sampled_from(["s1", "s2"]))
    def drift(self, rank, digest):
        self.world.nodes[rank % self.ranks].digests = {**SAME, "scheduler": digest}

    @rule()
    def restart(self):
        self.world.give(0, core.Command("restart"))

    @precondition(lambda self: hasattr(self, "world"))
    @rule()
    def all_is_well_again(self):
        """Mend everything: the group must serve within the time that the rules allow."""
        world = self.world
        world.cut, world.delays, world.slow = set(), [0.01, 0.01], {}
        world.answers = dict.fromkeys(world.answers, "ok")
        world.metrics = (0, "0")
        for rank, node in enumerate(world.nodes):
            node.hold, node.digests = "", dict(SAME)
            if node.agent is None:
                world.boot(rank)
        world.run(world.limits.drain + 10)
        for rank, node in enumerate(world.nodes):
            if node.agent is None:
                world.boot(rank)
        world.give(0, core.Command("reset"))
        world.until_serving(world.limits.quiet + 30)

    @invariant()
    def never_two_generations(self):
        if hasattr(self, "world"):
            self.world.check()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
