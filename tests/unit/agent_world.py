"""A world for agents without a clock, a network or processes: all three are lists, and the test moves them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkpair_rank import core

SAME = {"env": "e1", "scheduler": "s1"}


@dataclass
class Node:
    """One node: its agent (None while it is down), and the generations whose processes are alive there."""

    agent: core.Agent | None
    digests: dict[str, str] = field(default_factory=lambda: dict(SAME))
    alive: set[int] = field(default_factory=set)
    dying: list[tuple[float, int]] = field(default_factory=list)
    hold: str = ""
    compiling: bool = False
    actions: list[tuple[float, core.Action]] = field(default_factory=list)
    boots: int = 0


class World:
    """Agents, wires and a clock. A message is (deliver at, to, event); a wire that is cut drops what is sent."""

    def __init__(self, ranks: int = 2, limits: core.Limits | None = None, stop_takes: float = 0.5) -> None:
        self.now = 1000.0
        self.limits = limits or core.Limits()
        self.stop_takes = stop_takes
        self.answers = {"ready": "ok", "warmup": "ok", "canary": "ok"}
        self.delays = [0.01, 0.01]
        self.slow: dict[int, float] = {}
        """Worker rank to what all its messages are late by, beside the rail's delay."""
        self.cut: set[tuple[int, int]] = set()
        self.wires: list[tuple[float, int, int, core.Event]] = []
        self.probes: list[tuple[float, core.Event]] = []
        self.metrics: tuple[int, str | None] = (0, "0")
        self.names = [f"spark-{'abc'[rank]}" for rank in range(ranks)]
        self.nodes = [Node(None) for _ in range(ranks)]
        for rank in range(ranks):
            self.boot(rank)

    def boot(self, rank: int) -> None:
        """A new agent; systemd ended what the old one ran before it starts."""
        node = self.nodes[rank]
        node.alive.clear()
        node.dying.clear()
        node.boots += 1
        node.agent = core.Agent(rank, self.names, f"{self.names[rank]}-{node.boots}", self.limits)
        self.give(rank, core.Look(node.digests, node.hold))

    def crash(self, rank: int, tell: bool = True) -> None:
        """The agent is killed; systemd ends its processes with it. `tell`: peers see closed connections."""
        node = self.nodes[rank]
        node.agent = None
        node.alive.clear()
        node.dying.clear()
        if tell:
            for other in range(len(self.nodes)):
                if other != rank and (rank == 0 or other == 0):
                    self.send(rank, other, core.Closed(rank))

    def send(self, source: int, to: int, event: core.Event) -> None:
        for rail, delay in enumerate(self.delays):
            if (min(source, to) or max(source, to), rail) not in self.cut:
                self.wires.append((self.now + delay + self.slow.get(max(source, to), 0.0), rail, to, event))

    def speak(self) -> None:
        """Every agent sends its snapshot."""
        for rank, node in enumerate(self.nodes):
            if node.agent is None:
                continue
            if rank:
                self.send(rank, 0, core.Heard(node.agent.status))
            elif node.agent.order:
                for other in range(1, len(self.nodes)):
                    self.send(0, other, core.Heard(node.agent.order))

    def give(self, rank: int, event: core.Event) -> None:
        """Hand an event to an agent and do what it says."""
        node = self.nodes[rank]
        if node.agent is None:
            return
        for action in node.agent.handle(event, self.now):
            node.actions.append((self.now, action))
            match action:
                case core.Spawn(generation):
                    node.alive.add(generation)
                    self.check()
                case core.Kill(generation):
                    node.dying.append((self.now + self.stop_takes, generation))
                case core.Probe(generation, kind, within):
                    answer = self.answers[kind]
                    at = self.now + (within if answer == "late" else 0.3)
                    self.probes.append((at, core.Probed(generation, kind, answer, f"{kind} {answer}")))
                case core.ReadMetrics(generation):
                    self.probes.append((self.now + 0.01, core.Metrics(generation, *self.metrics, self.now)))
                case core.Leave():
                    assert not node.alive, "an agent left with processes"
                    if rank:
                        self.send(rank, 0, core.Heard(node.agent.status))
                    self.crash(rank)
                    return

    def check(self) -> None:
        """Never two generations alive at once, on any nodes."""
        alive = set().union(*(node.alive for node in self.nodes))
        assert len(alive) <= 1, f"generations {sorted(alive)} are alive together"

    def step(self, seconds: float = 0.1) -> None:
        self.now += seconds
        for node in self.nodes:
            for at, generation in list(node.dying):
                if at <= self.now:
                    node.dying.remove((at, generation))
                    node.alive.discard(generation)
                    if node.agent:
                        self.give(self.nodes.index(node), core.Gone(generation))
        due = sorted((wire for wire in self.wires if wire[0] <= self.now), key=lambda wire: wire[0])
        self.wires = [wire for wire in self.wires if wire[0] > self.now]
        for _, _, to, event in due:
            self.give(to, event)
        for at, event in [probe for probe in self.probes if probe[0] <= self.now]:
            self.probes.remove((at, event))
            self.give(0, event)
        for rank, node in enumerate(self.nodes):
            self.give(rank, core.Look(node.digests, node.hold, node.compiling))
            self.give(rank, core.Tick())
        self.speak()
        self.check()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def die(self, rank: int, text: str = "VLLM::Worker ended by signal 9", weight: int = 1, at: float = 5.0) -> None:
        """A process of the rank's generation ends by itself."""
        agent = self.nodes[rank].agent
        if agent and self.nodes[rank].alive:
            self.give(rank, core.Died(agent.own.generation, core.Cause(text, at, weight)))

    @property
    def head(self) -> core.Agent:
        agent = self.nodes[0].agent
        assert agent is not None
        return agent

    def alive(self) -> list[set[int]]:
        return [set(node.alive) for node in self.nodes]

    def serving(self) -> bool:
        agent = self.nodes[0].agent
        return agent is not None and agent.phase == core.SERVING and all(len(node.alive) == 1 for node in self.nodes)

    def until_serving(self, within: float = 60.0) -> float:
        """Run until the pair serves; returns the seconds that it took."""
        started = self.now
        while not self.serving():
            self.step()
            assert self.now - started < within, f"not serving after {within} s: {self.head.text(self.now)}"
        return self.now - started
