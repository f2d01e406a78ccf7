"""What an agent does, without input or output: events in, actions out. docs/decisions says why it is so.

One agent runs on each node. The one of rank 0 leads: it sends an *order* (run generation G, or run nothing), the others
send back their *status*. Both are complete snapshots that are sent again and again, so a lost or doubled message does
no harm. A status repeats the number of the order that it obeys. The leader starts generation G+1 only after every rank
answered "I obey order N, which says stop, and nothing of mine runs"; a rank that cannot be heard cannot answer. Hence
no two generations are ever alive at once, whatever is cut, delayed or killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Seconds = float
STOPPED, RUNNING, STOPPING = "stopped", "running", "stopping"
WAITING, STARTING, LOADING, WARMING, SERVING, DRAINING, FAILED = (
    "waiting",
    "starting",
    "loading",
    "warming",
    "serving",
    "draining",
    "failed",
)
ALIVE = (STARTING, LOADING, WARMING, SERVING, DRAINING)
UNFIT, PACKAGES = "unfit", "packages"
"""Entries among the digests that are text: why a node must not start, and "name version, name version, …"."""
NAMED = 3
"""Packages that are named where nodes differ."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds. Those of the network and the wedge are bounds of issue texts and of measurements in the lab."""

    lost: Seconds = 5.0
    """Silence on all rails after which a peer counts as lost."""
    ready: Seconds = 1800.0
    """Longest start of a generation, until its first completion."""
    drain: Seconds = 20.0
    """Longest wait for requests in flight before a wanted stop."""
    quiet: Seconds = 60.0
    """Nothing moves for so long, and a completion does not come for as long: wedged."""
    compile: Seconds = 1200.0
    """Longest stall that a compiler at work excuses (first FlashInfer build: up to 15 minutes, public reports)."""
    canary: Seconds = 60.0
    """Between two completions that nobody asked for, while the pair is idle."""
    metrics: Seconds = 5.0
    """Between two looks at vLLM's metrics."""
    backoff: Seconds = 2.0
    """Wait before the second restart; doubles with each one. The first is at once."""
    backoff_most: Seconds = 60.0
    generations: int = 5
    """Most generations that may end by themselves within `window`."""
    window: Seconds = 1800.0


@dataclass(frozen=True)
class Cause:
    """Why a rank ended: text, wall clock time (seconds since 1970), and what kind of witness it is.

    weight 0: an exception that names a fault; 1: a process that ended; 2: noise about a lost peer.
    """

    text: str
    at: float
    weight: int = 1


@dataclass(frozen=True)
class Status:
    """What an agent says of its node, complete every time. `obeys` is (incarnation of the leader, order number)."""

    rank: int
    incarnation: str
    phase: str = STOPPED
    generation: int = 0
    failed: int = 0
    obeys: tuple[str, int] = ("", 0)
    digests: Mapping[str, str] = field(default_factory=dict)
    hold: str = ""
    leaving: bool = False
    compiling: bool = False
    detail: str = ""
    cause: Cause | None = None


@dataclass(frozen=True)
class Order:
    """What the leader wants: run generation `run`, or nothing (0). `text` tells the group's state."""

    incarnation: str
    number: int
    run: int = 0
    graceful: bool = True
    evidence: bool = False
    serving: bool = False
    text: str = ""


# Events


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Died:
    """A process of the local generation ended by itself."""

    generation: int
    cause: Cause


@dataclass(frozen=True)
class Gone:
    """Nothing of the local generation is left."""

    generation: int
    cause: Cause | None = None


@dataclass(frozen=True)
class Look:
    """What the node looks like: digests on disk, a reason not to start, whether a compiler works, progress as text."""

    digests: Mapping[str, str]
    hold: str = ""
    compiling: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Heard:
    """A peer's message."""

    message: Status | Order


@dataclass(frozen=True)
class Closed:
    """A peer closed its last connection, which it does only when its agent ends."""

    rank: int


@dataclass(frozen=True)
class Probed:
    """A completion was tried. `answer`: ok, refused (nobody listens), late (no answer in time), broken (an error)."""

    generation: int
    kind: str
    answer: Literal["ok", "refused", "late", "broken"]
    text: str = ""


@dataclass(frozen=True)
class Metrics:
    """vLLM's metrics, asked for at `asked` (monotonic seconds); while draining, the guard's count alone.

    busy: requests running or waiting; progress: a text that changes whenever work advances, None without an answer.
    """

    generation: int
    busy: int
    progress: str | None
    asked: Seconds


@dataclass(frozen=True)
class Command:
    """leave: this agent is told to end. restart: a new generation. reset: forget earlier failures."""

    verb: Literal["leave", "restart", "reset"]


Event = Tick | Died | Gone | Look | Heard | Closed | Probed | Metrics | Command

# Actions


@dataclass(frozen=True)
class Spawn:
    generation: int


@dataclass(frozen=True)
class Kill:
    """End the local generation: at once, or by SIGTERM first when `graceful`; save evidence first when asked."""

    generation: int
    graceful: bool
    evidence: bool
    why: str


@dataclass(frozen=True)
class Probe:
    """Try a completion: ready, warmup or canary, within `within` seconds."""

    generation: int
    kind: str
    within: Seconds


@dataclass(frozen=True)
class Refuse:
    """From now on the API answers new requests with HTTP 503; those in flight go on."""


@dataclass(frozen=True)
class ReadMetrics:
    generation: int


@dataclass(frozen=True)
class Ready:
    """Tell systemd that the pair serves."""


@dataclass(frozen=True)
class Log:
    text: str


@dataclass(frozen=True)
class Leave:
    """This agent may end now."""


Action = Spawn | Kill | Probe | Refuse | ReadMetrics | Ready | Log | Leave


def name_difference(theirs: Mapping[str, str], own: Mapping[str, str], head: str) -> str:
    """The first difference of what two nodes would serve, by name; empty when there is none. Packages come first."""
    for key in sorted({*theirs, *own}, key=lambda key: (key != PACKAGES, key)):
        there, here = theirs.get(key, "none"), own.get(key, "none")
        if there != here and key == PACKAGES:
            only = [
                sorted(set(one.split(", ")) - set(other.split(", "))) for one, other in ((there, here), (here, there))
            ]
            there, here = (", ".join(names[:NAMED]) + (", …" if names[NAMED:] else "") or "none" for names in only)
            return f"packages differ: {there} there, {here} on {head}"
        if there != here:
            return f"{key} digest differs: {there} there, {here} on {head}"
    return ""


@dataclass
class Member:
    """What the leader knows of one other rank."""

    status: Status | None = None
    heard: Seconds = -1e9
    closed: bool = False


@dataclass
class Crash:
    at: Seconds
    generation: int
    cause: Cause


class Agent:
    """One agent. `handle` takes an event and the time (monotonic seconds) and returns what to do, in order."""

    def __init__(
        self, rank: int, names: Sequence[str], incarnation: str, limits: Limits | None = None, last: int = 0
    ) -> None:
        self.rank, self.names, self.limits = rank, list(names), limits or Limits()
        self.incarnation = incarnation
        self.own = Status(rank, incarnation, generation=last)
        self.leads = rank == 0
        self.order: Order | None = Order(incarnation, 1, text="starting") if self.leads else None
        self.order_heard = -1e9
        self.order_closed = False
        self.leader = ""
        self.past_leaders: set[str] = set()
        self.leave_since: Seconds | None = None
        self.was_ready = False
        self.actions: list[Action] = []
        # The leader's part.
        self.members: dict[int, Member] = {r: Member() for r in range(1, len(names))} if self.leads else {}
        self.phase = WAITING
        self.since: Seconds = 0.0
        self.started: Seconds = 0.0
        self.crashes: list[Crash] = []
        self.unsettled: tuple[int, Cause] | None = None
        self.end_reason = ""
        self.not_before: Seconds = -1e9
        self.probing = ""
        self.probed_at: Seconds = -1e9
        self.metrics_at: Seconds = -1e9
        self.busy = 0
        self.progress: str | None = None
        self.progress_at: Seconds = 0.0
        self.compiled_at: Seconds = -1e9
        self.canary_at: Seconds = -1e9
        self.drain_for = ""
        self.restart_wanted = False

    # What others see.

    @property
    def status(self) -> Status:
        """The snapshot for the leader."""
        obeys = (self.order.incarnation, self.order.number) if self.order else ("", 0)
        return replace(self.own, obeys=obeys)

    def text(self, now: Seconds) -> str:
        """One line for people: what this agent does, or what it waits for."""
        if self.leads:
            return self._group_text(now)
        if self.order is None:
            return f"waiting for {self.names[0]}: not heard"
        own = f"rank {self.rank} {self.own.detail}" if self.own.phase == RUNNING and self.own.detail else ""
        return own if own and not self.order.serving else self.order.text

    def summary(self, now: Seconds) -> dict[str, Any]:
        """The live state as plain data."""
        phase = self.phase if self.leads else ("serving" if self.order and self.order.serving else self.own.phase)
        return {
            "rank": self.rank,
            "name": self.names[self.rank],
            "phase": phase,
            "serving": bool(self.order and self.order.serving and self.own.phase == RUNNING),
            "text": self.text(now),
            "generation": self.own.generation,
            "local": self.own.phase,
            "hold": self.own.hold,
            "digests": {key: value for key, value in self.own.digests.items() if key != PACKAGES},
            "cause": self.crashes[-1].cause.text if self.crashes else (self.own.cause.text if self.own.cause else ""),
            "first_cause": self.crashes[0].cause.text if self.crashes else "",
            "crashes": len(self.crashes),
            "members": {
                self.names[rank]: {
                    "heard_s": round(now - member.heard, 1) if member.status else None,
                    "phase": member.status.phase if member.status else "unknown",
                    "generation": member.status.generation if member.status else 0,
                }
                for rank, member in self.members.items()
            },
        }

    # Events.

    def handle(self, event: Event, now: Seconds) -> list[Action]:
        """Take one event; returns the actions that follow from it, in order."""
        self.actions = []
        match event:
            case Died():
                self._died(event)
            case Gone():
                self._gone(event)
            case Look():
                self.own = replace(
                    self.own,
                    digests=event.digests,
                    hold=event.hold,
                    compiling=event.compiling,
                    detail=event.detail if self.own.phase == RUNNING else "",
                )
            case Heard():
                self._heard(event.message, now)
            case Closed():
                self._closed(event.rank)
            case Command():
                self._command(event.verb, now)
            case Probed():
                self._probed(event, now)
            case Metrics():
                self._metrics(event, now)
            case Tick():
                pass
        if self.leads:
            self._lead(now)
        self._obey(now)
        if self.leads:
            # The own rank may have changed by its own order; look once more so that nothing waits for a tick.
            self._lead(now)
        return self.actions

    def _do(self, action: Action) -> None:
        self.actions.append(action)

    def _died(self, event: Died) -> None:
        if self.own.phase != RUNNING or event.generation != self.own.generation:
            return
        self.own = replace(self.own, failed=event.generation, cause=event.cause)
        self._kill(False, False, event.cause.text)

    def _gone(self, event: Gone) -> None:
        if event.generation != self.own.generation or self.own.phase == STOPPED:
            return
        if self.own.phase == RUNNING:
            self.own = replace(self.own, failed=event.generation)
        cause = min(
            (cause for cause in (self.own.cause, event.cause) if cause), key=lambda c: (c.weight, c.at), default=None
        )
        self.own = replace(self.own, phase=STOPPED, cause=cause, detail="")

    def _heard(self, message: Status | Order, now: Seconds) -> None:
        if isinstance(message, Order):
            if self.leads:
                return
            old = self.order
            if old and old.incarnation == message.incarnation and message.number < old.number:
                return
            if message.incarnation in self.past_leaders:
                return
            if message.incarnation != self.leader:
                self.past_leaders.add(self.leader)
                self.leader = message.incarnation
            self.order, self.order_heard, self.order_closed = message, now, False
        elif self.leads and message.rank in self.members:
            member = self.members[message.rank]
            if member.status and member.status.incarnation != message.incarnation:
                # A new agent: what its predecessor ran has been ended before it spoke.
                self._do(Log(f"{self.names[message.rank]}: a new agent speaks"))
            member.status, member.heard, member.closed = message, now, False

    def _closed(self, rank: int) -> None:
        if self.leads and rank in self.members:
            self.members[rank].closed = True
        elif not self.leads and rank == 0:
            self.order_closed = True

    def _command(self, verb: str, now: Seconds) -> None:
        if verb == "leave" and self.leave_since is None:
            self.leave_since = now
            self.own = replace(self.own, leaving=True)
        elif verb in ("restart", "reset") and self.leads:
            self.crashes, self.not_before = [], -1e9
            if self.phase == FAILED:
                self._enter(WAITING, now)
            self.restart_wanted = verb == "restart" and self.phase in ALIVE

    # Every rank: obey the order.

    def _obey(self, now: Seconds) -> None:
        order, own, limits = self.order, self.own, self.limits
        lost = not self.leads and (self.order_closed or now - self.order_heard > limits.lost)
        if lost and order is not None:
            self.order = order = None
        # Rank 0 starts when all others run.
        wanted = order.run if order and not (self.leads and self.phase == STARTING) else 0
        if own.phase == RUNNING and own.generation != wanted:
            if order is None:
                self._kill(False, False, f"no word from {self.names[0]}")
            else:
                self._kill(order.graceful, order.evidence, order.text)
        elif own.phase == STOPPED and wanted > own.generation and not own.leaving:
            self.own = replace(own, phase=RUNNING, generation=wanted, cause=None, detail="starting")
            self._do(Spawn(wanted))
        if order and order.serving and self.own.phase == RUNNING and not self.was_ready:
            self.was_ready = True
            self._do(Ready())
        self._leave(now)

    def _leave(self, now: Seconds) -> None:
        if self.leave_since is None:
            return
        patience = self.limits.drain + 5.0
        overdue = now - self.leave_since > patience
        if self.own.phase == RUNNING and (overdue or self.order is None):
            self._kill(True, False, "told to stop")
        if self.own.phase == STOPPED:
            others = self.leads and not overdue and not self._all_stopped(now, lost_counts=True)
            if not others:
                self._do(Leave())

    def _kill(self, graceful: bool, evidence: bool, why: str) -> None:
        if self.own.phase == RUNNING:
            self.own = replace(self.own, phase=STOPPING, detail="")
            # Requests are the head's: a worker's vLLM has nothing to finish, and waits out the bound of a SIGTERM.
            self._do(Kill(self.own.generation, graceful and self.leads, evidence, why))

    # The leader: decide what all ranks do.

    def _enter(self, phase: str, now: Seconds) -> None:
        self.phase, self.since = phase, now

    def _set_order(self, **changes: Any) -> None:
        assert self.order is not None
        new = replace(self.order, **changes)
        if (new.run, new.graceful, new.evidence) != (self.order.run, self.order.graceful, self.order.evidence):
            new = replace(new, number=self.order.number + 1)
        self.order = new

    def _lost(self, member: Member, now: Seconds) -> bool:
        return member.status is None or member.closed or now - member.heard > self.limits.lost

    def _lead(self, now: Seconds) -> None:
        if any(status.compiling for status in self._statuses()):
            self.compiled_at = now
        if self.phase in ALIVE:
            self._watch(now)
        if self.phase == WAITING:
            self._settle(now)
            if self.phase == WAITING and not self._blocked(now):
                self._begin(now)
        if self.phase == STARTING and all(
            member.status and member.status.phase == RUNNING and member.status.generation == self._run
            for member in self.members.values()
        ):
            self._enter(LOADING, now)
        self._drive(now)
        self._set_order(serving=self.phase in (SERVING, DRAINING), text=self._group_text(now))

    @property
    def _run(self) -> int:
        assert self.order is not None
        return self.order.run

    def _statuses(self) -> list[Status]:
        return [self.own, *(member.status for member in self.members.values() if member.status)]

    def _begin(self, now: Seconds) -> None:
        generation = max(status.generation for status in self._statuses()) + 1
        self._set_order(run=generation, graceful=True, evidence=False)
        self._enter(STARTING, now)
        self.started, self.probing, self.probed_at = now, "", -1e9
        self.busy, self.progress, self.progress_at, self.canary_at = 0, None, now, now
        self.metrics_at = self.compiled_at = -1e9
        self._do(Log(f"generation {generation} starts: ranks above 0 first, rank 0 last"))

    def _watch(self, now: Seconds) -> None:
        """End the generation when something is wrong with it, or when a stop is wanted."""
        run = self._run
        not_yet = self.own.generation < run  # rank 0 starts last
        if self.own.failed == run:
            return self._end(now, self.own.cause or Cause(f"{self.names[0]}: rank 0 ended", 0.0), crash=True)
        if self.own.phase != RUNNING and not not_yet:
            return self._end(now, Cause(f"{self.names[0]}: rank 0 was ended", 0.0), crash=False)
        for rank, member in self.members.items():
            name = self.names[rank]
            status = member.status
            if status and status.failed == run and not member.closed:
                return self._end(now, status.cause or Cause(f"{name}: rank {rank} ended", 0.0), crash=True)
            if status is None or self._lost(member, now):
                what = "its agent ended" if member.closed else f"not heard for {self.limits.lost:.0f} s on any rail"
                if status and status.leaving:
                    what = "stopped there"
                return self._end(now, Cause(f"{name}: {what}", 0.0), crash=False)
            if self.phase != STARTING and status.generation != run:
                return self._end(now, Cause(f"{name}: a new agent, nothing runs there", 0.0), crash=False)
            # Also while others still start: what a rank ended, having lost the leader, it does not start again.
            if status.generation == run and status.phase != RUNNING:
                return self._end(now, Cause(f"{name}: rank {rank} was ended there", 0.0), crash=False)
        leaving = [self.names[status.rank] for status in self._statuses() if status.leaving]
        if leaving and not self.drain_for:
            return self._drain(now, f"stopped on {leaving[0]}")
        if self.restart_wanted and not self.drain_for:
            self.restart_wanted = False
            return self._drain(now, "a restart was asked for")
        if self.phase in (STARTING, LOADING, WARMING) and now - self.started > self.limits.ready:
            text = f"no completion within {self.limits.ready:.0f} s of the start ({self.own.detail or 'no output'})"
            return self._end(now, Cause(text, 0.0), crash=True)
        return None

    def _drain(self, now: Seconds, why: str) -> None:
        self.drain_for = why
        if self.phase == SERVING:
            self._enter(DRAINING, now)
            self.busy, self.metrics_at = 1, -1e9
            self._do(Refuse())
        else:
            self._end(now, Cause(why, 0.0), crash=False, graceful=True)

    def _end(self, now: Seconds, cause: Cause, crash: bool, graceful: bool = False, evidence: bool = False) -> None:
        """No rank runs this generation any more."""
        run = self._run
        self.end_reason, self.drain_for, self.probing = cause.text, "", ""
        self.unsettled = (run, cause) if crash else None
        self._do(Log(f"generation {run} ends: {cause.text}"))
        self._set_order(run=0, graceful=graceful, evidence=evidence)
        self._enter(WAITING, now)

    def _all_stopped(self, now: Seconds, lost_counts: bool = False) -> bool:
        assert self.order is not None
        mark = (self.order.incarnation, self.order.number)
        for member in self.members.values():
            if lost_counts and self._lost(member, now):
                continue
            if member.status is None or member.status.phase != STOPPED or member.status.obeys != mark:
                return False
        return self.order.run == 0 and self.own.phase == STOPPED

    def _settle(self, now: Seconds) -> None:
        """After a crash, when all ranks have ended: name its cause, and decide whether to go on."""
        if self.unsettled is None or not self._all_stopped(now, lost_counts=True):
            return
        run, cause = self.unsettled
        self.unsettled = None
        witnesses = [cause, *(s.cause for s in self._statuses() if s.cause and s.generation == run)]
        cause = min(witnesses, key=lambda witness: (witness.weight, witness.at))
        self.end_reason = cause.text
        limits = self.limits
        self.crashes = [crash for crash in self.crashes if now - crash.at < limits.window]
        self.crashes.append(Crash(now, run, cause))
        self._do(Log(f"generation {run} ended because of: {cause.text}"))
        if len(self.crashes) >= limits.generations:
            self._enter(FAILED, now)
            self._do(Log(self._group_text(now)))
            return
        restarts = len(self.crashes) - 1
        self.not_before = now + (min(limits.backoff * 2 ** (restarts - 1), limits.backoff_most) if restarts else 0.0)

    def _blocked(self, now: Seconds) -> str:
        """Why no generation can start now, for people; empty when one can."""
        for rank, member in self.members.items():
            if member.status is None or self._lost(member, now):
                gone = "stopped there" if member.status and member.status.leaving else "not heard"
                return f"waiting for {self.names[rank]}: {gone}"
        for status in self._statuses():
            if status.leaving:
                return f"stopping: told to on {self.names[status.rank]}"
            if status.hold:
                return f"held on {self.names[status.rank]}: {status.hold}"
        if not self._all_stopped(now):
            slow = [self.names[s.rank] for s in self._statuses() if s.phase != STOPPED] or self.names[1:]
            return f"waiting for {slow[0]}: to end its processes"
        for status in self._statuses():
            if not status.digests:
                return f"reading what {self.names[status.rank]} would serve"
            if unfit := status.digests.get(UNFIT):
                return f"not started, {self.names[status.rank]}: {unfit}"
        for member in self.members.values():
            assert member.status is not None
            if differs := name_difference(member.status.digests, self.own.digests, self.names[0]):
                return f"waiting for {self.names[member.status.rank]}: {differs}"
        if now < self.not_before:
            return f"starting again in {self.not_before - now:.0f} s"
        return ""

    def _group_text(self, now: Seconds) -> str:
        limits = self.limits
        if self.phase == WAITING:
            why = f" (generation {self.own.generation}: {self.end_reason})" if self.end_reason else ""
            return f"{self._blocked(now)}{why}"
        if self.phase == FAILED:
            first = self.crashes[0].cause.text if self.crashes else ""
            return (
                f"failed: {len(self.crashes)} generations ended within {limits.window / 60:.0f} min; "
                f"the first because of: {first}; mend it, then playbooks/restart.yml"
            )
        generation = f"generation {self._run}"
        if self.phase in (STARTING, LOADING):
            slow = [s for s in self._statuses() if s.detail and s.phase == RUNNING]
            detail = f"rank {slow[0].rank} {slow[0].detail}" if slow else "starting"
            return f"{generation}: {detail}"
        return f"{generation}: {'draining, ' + self.drain_for if self.phase == DRAINING else self.phase}"

    def _drive(self, now: Seconds) -> None:
        """Ask for probes and metrics when they are due."""
        run, limits = self._run, self.limits
        if self.phase == LOADING and not self.probing and now - self.probed_at >= 1.0:
            self._probe("ready", run, limits.ready, now)
        elif self.phase == WARMING and not self.probing:
            self._probe("warmup", run, limits.ready, now)
        elif self.phase == DRAINING:
            if self.busy == 0 or now - self.since > limits.drain:
                self._end(now, Cause(self.drain_for, 0.0), crash=False, graceful=True)
            elif now - self.metrics_at >= 0.5:
                self.metrics_at = now
                self._do(ReadMetrics(run))
        elif self.phase == SERVING and not any(status.hold for status in self._statuses()):
            if now - self.metrics_at >= limits.metrics:
                self.metrics_at = now
                self._do(ReadMetrics(run))
            still = now - self.progress_at
            due = now - self.canary_at >= (limits.quiet / 2 if self.busy else limits.canary)
            if not self.probing and due and still >= (limits.quiet / 2 if self.busy else 0.0):
                self.canary_at = now
                self._probe("canary", run, limits.quiet, now)

    def _probe(self, kind: str, run: int, within: Seconds, now: Seconds) -> None:
        self.probing, self.probed_at = kind, now
        self._do(Probe(run, kind, within))

    def _probed(self, event: Probed, now: Seconds) -> None:
        if not self.leads or event.kind != self.probing or event.generation != self._run:
            return
        self.probing = ""
        if event.kind == "ready" and self.phase == LOADING:
            if event.answer == "ok":
                self._do(Log(f"first completion {now - self.started:.1f} s after the start of the generation"))
                self._enter(WARMING, now)
            elif event.answer == "broken":
                self._end(now, Cause(f"the first completion failed: {event.text}", 0.0), crash=True)
        elif event.kind == "warmup" and self.phase == WARMING:
            if event.answer == "ok":
                self._do(Log(f"serving {now - self.started:.1f} s after the start of the generation"))
                self.progress_at = self.canary_at = now
                self.end_reason = ""
                self._enter(SERVING, now)
            else:
                self._end(now, Cause(f"the warm-up failed: {event.text}", 0.0), crash=True)
        elif event.kind == "canary" and self.phase == SERVING:
            self._judge(event, now)

    def _judge(self, event: Probed, now: Seconds) -> None:
        """A canary came back, or not: is the engine wedged?"""
        if event.answer == "ok":
            self.progress_at = now
        elif event.answer in ("refused", "broken"):
            self._end(now, Cause(f"a completion failed: {event.text}", 0.0), crash=True)
        elif any(status.hold for status in self._statuses()) or self.progress_at > self.canary_at:
            self._do(Log("a completion was late while others advanced: busy, not wedged"))
        elif self.compiled_at > self.canary_at - self.limits.quiet and now - self.progress_at < self.limits.compile:
            self._do(Log("a completion was late while a compiler works: not wedged"))
        else:
            text = f"wedged: nothing moved for {now - self.progress_at:.0f} s and a completion did not come"
            self._end(now, Cause(text, 0.0), crash=True, evidence=True)

    def _metrics(self, event: Metrics, now: Seconds) -> None:
        if not self.leads or event.generation != self._run:
            return
        # While draining, only an answer to a later question tells that nothing is in flight any more.
        if event.progress is not None and (self.phase != DRAINING or event.asked > self.since):
            self.busy = event.busy
            if event.progress != self.progress:
                self.progress, self.progress_at = event.progress, now
