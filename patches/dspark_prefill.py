"""Admission gate for partial prefills, called from hooks inside vLLM's v1 scheduler.

The patcher (``patcher.py``) installs this file beside ``vllm/v1/core/sched/scheduler.py`` and adds a few lines there
that call :func:`attach` at construction and the methods of the gate during ``schedule()``. Standard library only, no
import from vLLM: everything is read from the objects that the hooks hand over, through attributes that exist in every
release from 0.11 on.

A *partial prefill* is a request in ``running`` that still has prompt (or, after a preemption, old output) to compute.
The count that matters is the one at the moment of the decision, so it is taken from ``running`` after the running
loop, and requests admitted since are added as they appear at its end (``running`` only grows in the waiting loop).

Environment, read once in :func:`attach`:

``DSPARK_MAX_INFLIGHT_PREFILLS``  1 to 3. Blank, zero or negative: the release's ``max_num_partial_prefills`` where it
    has that field, else 1. Anything but an ASCII integer: one warning, then the same. Above 3: 3.
``DSPARK_PREFILL_POLICY``         ``strict`` (default): at the cap no further prompt is admitted in this step.
    ``fair``: at the cap long prompts are skipped, short ones go on; see :class:`FairGate`.
``DSPARK_MIXED_PREFILL_TOKENS``   With ``fair``: prefill tokens in a step that also decodes. Blank or not above zero:
    the engine's ``long_prefill_token_threshold`` where that is set, else 480.
``DSPARK_ISSUE43_SCHED_DIAG``     1: one line ``[issue43-step N] {json}`` per step that scheduled anything; its fields:
    the docstring of :meth:`StrictGate.report`.
``DSPARK_PREFILL_HOTFIX_OFF``     1: the hooks do nothing.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

REVISION = 4
"""Counts up with every change of the hooks or of this file's behaviour; shown by the log line and the status."""

HARD_CAP = 3
"""More partial prefills than this at once recreate the starvation that the cap is there to prevent."""

ADMIT, SKIP, STOP = 0, 1, 2
"""Verdicts of the gate: go on with this request; leave it queued and look at the next; end the waiting loop."""

MAX_WARNINGS = 16

ALLOWANCE = 480
"""Prefill tokens beside live streams in one step, where neither the environment nor the engine's options say."""

SHORT_STEPS = 4
"""A prompt is short when it can be computed in so many steps of the whole allowance."""

LOOK_AHEAD = 16
"""Waiting requests that one step considers, beyond those that it admits."""

MOST_STALLED = 8
"""Steps without a token after which a running prefill gets one step's budget, whatever is beside it."""

MEASURE_AGAIN = 32
"""Steps after which the cached prefix of a held request is looked up again."""


logger = logging.getLogger(__name__)


class Request(Protocol):
    """The attributes of vLLM's ``Request`` that the gate reads. All counts are in tokens."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    priority: int
    status: Any

    @property
    def num_tokens(self) -> int: ...


class Settings:
    """What the environment asked for, after parsing. ``warnings`` holds one line for each value that was not used."""

    __slots__ = ("allowance", "cap", "diag", "off", "policy", "warnings")

    def __init__(self, environ: Mapping[str, str], configured: object = None) -> None:
        """``configured`` is the release's own ``max_num_partial_prefills``, or None where it has no such field."""
        self.warnings: list[str] = []
        self.off = _flag(environ.get("DSPARK_PREFILL_HOTFIX_OFF", ""))
        self.diag = _flag(environ.get("DSPARK_ISSUE43_SCHED_DIAG", ""))
        self.cap = self._cap(environ.get("DSPARK_MAX_INFLIGHT_PREFILLS", ""), configured)
        self.allowance = self._allowance(environ.get("DSPARK_MIXED_PREFILL_TOKENS", ""))
        self.policy = environ.get("DSPARK_PREFILL_POLICY", "").strip().lower() or "strict"
        if self.policy not in GATES:
            self.warnings.append(
                f"DSPARK_PREFILL_POLICY={self.policy!r} is none of {', '.join(sorted(GATES))}; using strict"
            )
            self.policy = "strict"

    def _cap(self, raw: str, configured: object) -> int:
        fallback = configured if isinstance(configured, int) and configured >= 1 else 1
        value = parse_int(raw)
        if value is None and raw.strip():
            self.warnings.append(
                f"DSPARK_MAX_INFLIGHT_PREFILLS={raw!r} is not an integer; using {min(fallback, HARD_CAP)}"
            )
        return min(value if value is not None and value > 0 else fallback, HARD_CAP)

    def _allowance(self, raw: str) -> int:
        value = parse_int(raw)
        if value is None and raw.strip():
            self.warnings.append(f"DSPARK_MIXED_PREFILL_TOKENS={raw!r} is not an integer; using the default")
        return max(value or 0, 0)


def parse_int(raw: str) -> int | None:
    """Read an optionally signed ASCII integer; None for blank and for anything else (``int()`` also takes ``1_0``)."""
    text = raw.strip()
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None


def _flag(raw: str) -> bool:
    return raw.strip().lower() not in ("", "0", "false", "no", "off")


def remaining_tokens(request: Request) -> int:
    """Tokens of ``request`` that no step has been scheduled for yet, apart from the one a decode step computes.

    A request with output has its newest token still to compute, and that is a decode, not a prefill; this holds too
    for one that was preempted and replays its output. Output placeholders of asynchronous scheduling count as computed
    but not as tokens, so the result can be negative. Draft tokens are not in ``num_tokens``.
    """
    total = request.num_tokens
    return total - request.num_computed_tokens - (1 if total > request.num_prompt_tokens else 0)


def partial_prefills(running: list[Request]) -> list[Request]:
    """Those of ``running`` with more to compute than their newest output token (:func:`remaining_tokens`, inlined)."""
    return [r for r in running if (total := r.num_tokens) - r.num_computed_tokens > (total > r.num_prompt_tokens)]


def holds_work(request: Request) -> bool:
    """Whether a waiting request must not be queued behind the cap.

    True for a live stream that was preempted, and for one whose blocks are allocated already (a finished transfer of
    its KV cache, a streaming session): while it waits nobody else can have those blocks.
    """
    return request.num_computed_tokens > 0 or getattr(request.status, "name", "") == "PREEMPTED"


class Gate:
    """Does nothing: ``DSPARK_PREFILL_HOTFIX_OFF=1``. The policies override what they need.

    ``clipped`` holds the ids of running requests whose chunk the policy wants to see (:meth:`clip`).
    """

    clipped: frozenset[str] | set[str] | dict[str, int] = frozenset()

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.scheduler = scheduler
        self.settings = settings

    def begin(self) -> Gate:
        """At the start of ``schedule()``."""
        return self

    def clip(self, request: Request, tokens: int, budget: int) -> int:
        """Chunk (tokens) for a running request in ``clipped``, of the ``budget`` that is left."""
        return tokens

    def before_lookup(self, request: Request, scheduled: Mapping[str, int]) -> int:
        """Verdict on a waiting request before its cached prefix is looked up; ``scheduled`` is tokens by request."""
        return ADMIT

    def chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Chunk (tokens, at least 1) for a waiting request of which ``computed`` tokens are cached."""
        return tokens

    def after_lookup(
        self, request: Request, computed: int, tokens: int, scheduled: Mapping[str, int], loading: bool
    ) -> int:
        """Verdict on a waiting request that would compute ``tokens``; ``loading``: its KV is fetched, not computed."""
        return ADMIT

    def end(self, scheduled: Mapping[str, int]) -> None:
        """Before ``schedule()`` returns."""


class StrictGate(Gate):
    """At the cap, admit no further prompt in this step; a prefill holds its slot through the step of its last chunk.

    Never held: requests that hold work (:func:`holds_work`), and any request when the step before scheduled nothing and
    this one has not either, so that an engine whose partial prefills cannot move is not idle for ever.
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        super().__init__(scheduler, settings)
        self.step = 0
        self.idle_steps = 0
        self.warnings = 0
        self.unfinished: list[Request] = []  # partial prefills in `running` at the start of the step
        self.partial: dict[str, int] = {}  # partial prefills that count now, with the tokens they have left
        self.seen = -1  # entries of `running` looked at in this step; -1: none yet
        self.exempt: set[str] | None = None  # waiting requests that this step must still look at; None: not asked yet
        self.held: dict[str, str] = {}  # waiting request that this step left waiting: why
        self.exempted: dict[str, str] = {}  # one that was let through where another would have been held: why
        self.demand: dict[str, int] = {}  # position in `running` of every request due a decode token; filled for DIAG
        self.skip_run: dict[str, int] = {}
        self.held_since: dict[str, int] = {}  # step of the first hold of a request that is still held; for DIAG

    def begin(self) -> Gate:
        self.step += 1
        self.seen, self.exempt = -1, None
        if self.held or self.exempted:
            self.held, self.exempted = {}, {}
        if self.settings.diag:
            self.demand = {r.request_id: i for i, r in enumerate(self.scheduler.running) if self._wants_decode(r)}
        return self

    def before_lookup(self, request: Request, scheduled: Mapping[str, int]) -> int:
        if self.seen < 0:
            self._look_at(partial_prefills(self.scheduler.running))
            self.partial = {r.request_id: remaining_tokens(r) for r in self.unfinished}
        self._count_admitted(scheduled)
        if len(self.partial) < self.settings.cap or self._exempted(request, scheduled):
            return ADMIT
        return self._last_look(request, "cap")

    def end(self, scheduled: Mapping[str, int]) -> None:
        self.idle_steps = 0 if scheduled else self.idle_steps + 1
        if self.held and hasattr(self.scheduler, "prefill_capacity_bound"):
            # Held requests are a backlog: without this, releases that pace prefills would pace them on top of the cap.
            self.scheduler.prefill_capacity_bound = True
        if self.settings.diag and scheduled:
            logger.info("[issue43-step %d] %s", self.step, json.dumps(self.report(scheduled), separators=(",", ":")))

    def _look_at(self, unfinished: list[Request]) -> None:
        """Take ``unfinished`` as the partial prefills of this step so far, and warn of any that vLLM does not track."""
        self.unfinished = unfinished
        self.seen = len(self.scheduler.running)
        tracked = getattr(self.scheduler, "_inflight_prefills", None)
        if tracked is None or not unfinished or self.warnings >= MAX_WARNINGS:
            return
        missed = {r.request_id for r in unfinished}.difference(r.request_id for r in tracked)
        if missed:
            self.warnings += 1
            logger.warning("[issue27-adm] partial prefills that vLLM does not track: %s", ", ".join(sorted(missed)))

    def _count_admitted(self, scheduled: Mapping[str, int]) -> None:
        """Add what was admitted since the last look and stays partial: O(admitted)."""
        running = self.scheduler.running
        while self.seen < len(running):
            request = running[self.seen]
            left = remaining_tokens(request) - scheduled.get(request.request_id, 0)
            if left > 0:
                self.partial[request.request_id] = left
            self.seen += 1

    def _exempted(self, request: Request, scheduled: Mapping[str, int]) -> bool:
        if not holds_work(request) and (scheduled or not self.idle_steps):
            return False
        if self.exempt:
            self.exempt.discard(request.request_id)
        why = "blocks" if request.num_computed_tokens else "preempted" if holds_work(request) else "idle"
        self.exempted[request.request_id] = why
        return True

    def _last_look(self, request: Request, why: str) -> int:
        """Hold ``request``, and look no further unless somebody behind it must not wait."""
        self.held[request.request_id] = why
        if self.exempt is None:
            self.exempt = {r.request_id for r in self._waiting() if self._must_be_seen(r)}
        return SKIP if self.exempt else STOP

    def _waiting(self) -> Iterator[Request]:
        """Every waiting request, roughly in order; the queues differ by release."""
        for name in ("kv_holding_waiting", "skipped_waiting", "waiting"):
            queue = getattr(self.scheduler, name, None) or ()
            for entry in getattr(queue, "_heap", queue):  # iterating a priority queue would copy and sort it
                yield entry[-1] if isinstance(entry, tuple) else entry

    def _must_be_seen(self, request: Request) -> bool:
        if getattr(request.status, "name", "") == "WAITING_FOR_REMOTE_KVS":
            return request.request_id in getattr(self.scheduler, "finished_recving_kv_req_ids", ())
        return holds_work(request)

    def _wants_decode(self, request: Any) -> bool:
        """Whether ``request`` is due a token in this step: past its prefill, not at its end, not paced."""
        placeholders = getattr(request, "num_output_placeholders", 0)
        end = request.num_prompt_tokens + request.max_tokens
        return (
            remaining_tokens(request) <= 0
            and request.num_tokens_with_spec + placeholders > request.num_computed_tokens
            and request.num_computed_tokens + 1 < self.scheduler.max_model_len
            and not (placeholders and request.num_computed_tokens + 2 - placeholders >= end)
            and getattr(self.scheduler, "current_step", 0) + 1 >= getattr(request, "next_decode_eligible_step", 0)
            and getattr(getattr(self.scheduler, "_pause_state", None), "name", "") != "PAUSED_ALL"
        )

    def report(self, scheduled: Mapping[str, int]) -> dict[str, Any]:
        """What the step did, for its line in the log.

        ``live``: requests due a token; ``running``: all; ``partial``: partial prefills that count; ``tracked``: those
        that vLLM tracks (null before 0.23), and ``overcounted``, which of them neither are partial nor load; ``cap``;
        ``prefill`` and ``decode``: tokens by request; ``held`` and ``exempt``: reason by request. Held at the "cap",
        for the last "slot", for its "share" of the step, or "unseen" behind 16 others; exempt since it has "blocks",
        was "preempted", "loads", is "cached", or everything else is "idle". ``oldest_hold``: steps since the first hold
        of a request that is held; ``decode_skips``: position in ``running``, and skips in a row, of every request that
        was due and got nothing. Of ``fair`` also ``allowance``, ``boost`` (nobody decodes: the whole budget is for
        prefill), ``share`` of this step and what is ``used`` of it, what short prompts ``want``, and their ``credit``,
        all in tokens.
        """
        running = {r.request_id for r in self.scheduler.running}
        skips = {r: at for r, at in self.demand.items() if r in running and r not in scheduled}
        self.skip_run = {r: self.skip_run.get(r, 0) + 1 for r in skips}
        if self.seen >= 0:  # a step that had no budget left for waiting requests held nobody anew
            self.held_since = {r: self.held_since.get(r, self.step) for r in self.held}
        partial = self.partial if self.seen >= 0 else {r.request_id for r in partial_prefills(self.scheduler.running)}
        tracked = getattr(self.scheduler, "_inflight_prefills", None)
        loading = {r.request_id for r in tracked or () if getattr(r.status, "name", "") == "WAITING_FOR_REMOTE_KVS"}
        decode = {r: n for r, n in scheduled.items() if r in self.demand}
        return {
            "live": len(self.demand),
            "running": len(running),
            "partial": len(partial),
            "tracked": None if tracked is None else len(tracked),
            "overcounted": sorted({r.request_id for r in tracked or ()}.difference(partial, loading)),
            "cap": self.settings.cap,
            "prefill": {r: n for r, n in scheduled.items() if r not in decode},
            "decode": decode,
            "held": self.held,
            "oldest_hold": self.step - min(self.held_since.values(), default=self.step),
            "exempt": self.exempted,
            "decode_skips": {r: {"position": at, "run": self.skip_run[r]} for r, at in skips.items()},
        }


class FairGate(StrictGate):
    """Bound the prefill beside live streams, let short prompts past long ones, never hold who holds work.

    A step that decodes computes at most ``allowance`` tokens of prefill, and leaves every stream its tokens of the
    budget. A prompt that would stay partial at the cap is held after its cached prefix is known, by skipping it: what
    fits into the step goes on. With a cap of 2 or more the last slot is for short prompts. While short prompts wait, a
    long prefill leaves them the step, out of a credit that grows by half of every step: it keeps the other half.
    Under the priority policy the last slot is also for a prompt that outranks everything in flight, which then gets the
    share and leaves the outranked a sixteenth.
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        super().__init__(scheduler, settings)
        config = scheduler.scheduler_config = copy.copy(scheduler.scheduler_config)
        # Hybrid models cut prefills at block ends: a chunk below one block would never move.
        self.grain = scheduler.cache_config.block_size if getattr(scheduler, "need_mamba_block_aligned_split", 0) else 1
        self.allowance = max(settings.allowance or config.long_prefill_token_threshold or ALLOWANCE, self.grain)
        # The allowance takes the threshold's place: that one also slows prefills that nobody decodes beside.
        config.long_prefill_token_threshold = 0
        self.whole_items = getattr(config, "disable_chunked_mm_input", False)
        self.short = SHORT_STEPS * self.allowance
        self.by_rank = config.policy == "priority"
        self.top: float = 0  # lowest number, that is highest rank, among the partial prefills
        self.share = 0  # prefill tokens that this step may compute
        self.credit = 0  # tokens that short prompts may still take from long ones
        self.used = 0
        self.want = 0  # part of the share that long prefills leave to short ones
        self.stalled: dict[str, int] = {}  # partial prefill: steps in a row that gave it nothing
        self.measured: dict[str, tuple[int, int]] = {}  # held request: tokens left after its lookup, step of that

    def begin(self) -> Gate:
        super().begin()
        scheduler = self.scheduler
        self.unfinished = partial_prefills(scheduler.running)
        decoders = len(scheduler.running) - len(self.unfinished)
        self.share = scheduler.max_num_scheduled_tokens
        if decoders:
            room = self.share - decoders * (1 + scheduler.num_spec_tokens)
            self.share = max(min(self.allowance, room), self.allowance // 8, self.grain)
        self.used = 0
        self.want = self._want()
        if self.by_rank:
            self.top = min((r.priority for r in self.unfinished), default=math.inf)
        if len(self.measured) > 1024:  # requests that were aborted while they were held
            self.measured = {k: v for k, v in self.measured.items() if self.step - v[1] < MEASURE_AGAIN}
        self.clipped = {r.request_id for r in self.unfinished}
        return self

    def _want(self) -> int:
        """Tokens of the share that short prompts, running and waiting, can use in this step, as far as credit goes."""
        most = self.share - self.share // 16  # the rest keeps long prefills moving
        self.credit = min(self.credit + self.share // 2, 2 * self.share)
        room = min(most, self.credit)
        slot = self.settings.cap > 1  # with a slot of its own a short prompt need not fit into one step
        limit = self.short if slot else min(most, self.short)
        want = sum(n for r in self.unfinished if (n := remaining_tokens(r)) <= self.short) if slot else 0
        for request in islice(self._waiting(), LOOK_AHEAD):
            known = self.measured.get(request.request_id)
            n = known[0] if known else request.num_tokens - request.num_computed_tokens
            if n <= limit and (slot or want + n <= room):
                want += n
        return min(want, room)

    def _pay(self, tokens: int) -> None:
        """A short prompt got ``tokens``."""
        self.want -= min(tokens, self.want)
        self.credit -= min(tokens, self.credit)

    def _give(self, tokens: int, leave: int) -> int:
        """At most ``tokens`` of what is left of the share, less what others are to find (``leave``)."""
        room = self.share - self.used
        if room - leave >= self.grain:
            room -= leave
        return max(min(tokens, room), 0)

    def clip(self, request: Request, tokens: int, budget: int) -> int:
        if self._uncut(request) or self.stalled.get(request.request_id, 0) >= MOST_STALLED:
            return tokens
        short = remaining_tokens(request) <= self.short
        leave = self.want if self.settings.cap == 1 or not short else 0
        if self.by_rank and request.priority > self.top:
            leave = self.share - self.share // 16
        given = self._give(tokens, leave)
        self.used += given
        if short and self.settings.cap > 1:
            self._pay(given)
        return given

    def before_lookup(self, request: Request, scheduled: Mapping[str, int]) -> int:
        if self.seen < 0:
            self._look_at(self.unfinished)
            left = {r.request_id: remaining_tokens(r) - scheduled.get(r.request_id, 0) for r in self.unfinished}
            self.partial = {name: n for name, n in left.items() if n > 0}
            self.used = sum(scheduled.get(name, 0) for name in left)
        self._count_admitted(scheduled)
        if len(self.held) >= LOOK_AHEAD:
            return ADMIT if self._exempted(request, scheduled) else self._last_look(request, "unseen")
        known, when = self.measured.get(request.request_id, (0, 0))
        if known and self.step - when < MEASURE_AGAIN and (why := self._full(request, known, self.share - self.used)):
            # Looking its prefix up again would change nothing.
            if self._exempted(request, scheduled):
                return ADMIT
            self.held[request.request_id] = why
            return SKIP
        return ADMIT

    def chunk(self, request: Request, computed: int, tokens: int) -> int:
        left = request.num_tokens - computed
        if left <= 1 or self._uncut(request):
            return tokens
        return max(self._give(tokens, self.want if left > self.short else 0), 1)

    def after_lookup(
        self, request: Request, computed: int, tokens: int, scheduled: Mapping[str, int], loading: bool
    ) -> int:
        left = request.num_tokens - computed
        name = request.request_id
        if loading or left <= 1:
            if self.settings.diag and self._full(request, left, tokens):
                self.exempted[name] = "loads" if loading else "cached"
            return ADMIT
        why = self._full(request, left, tokens)
        if why and not self._exempted(request, scheduled):
            self.held[name] = why
            self.measured[name] = (left, self.step)
            return SKIP
        self.measured.pop(name, None)
        self.used += tokens
        if self.by_rank:
            self.top = min(self.top, request.priority)
        if left <= self.short:
            self._pay(tokens)
        return ADMIT

    def end(self, scheduled: Mapping[str, int]) -> None:
        super().end(scheduled)
        names = [r.request_id for r in self.unfinished]
        self.stalled = {name: self.stalled.get(name, 0) + 1 for name in names if name not in scheduled}

    def _uncut(self, request: Request) -> bool:
        """Whether a part of ``request`` must be computed whole, so that a smaller chunk might never move it."""
        return self.whole_items and bool(getattr(request, "has_encoder_inputs", False))

    def _full(self, request: Request, left: int, tokens: int) -> str:
        """Why a prompt with ``left`` tokens to compute has no place in this step, with a chunk of ``tokens``; or ''."""
        cap = self.settings.cap
        outranks = self.by_rank and cap > 1 and bool(self.partial) and request.priority < self.top
        if self.used >= self.share and not outranks:
            return "share"
        if tokens >= left:
            return ""
        if len(self.partial) >= cap:
            return "cap"
        # The last slot is for short prompts, and for one that outranks everybody in flight.
        if cap > 1 and left > self.short and not outranks and self._long() >= cap - 1:
            return "slot"
        return ""

    def _long(self) -> int:
        return sum(n > self.short for n in self.partial.values())

    def report(self, scheduled: Mapping[str, int]) -> dict[str, Any]:
        boost = self.share == self.scheduler.max_num_scheduled_tokens
        fair = {"share": self.share, "used": self.used, "want": self.want, "credit": self.credit}
        return {**super().report(scheduled), "allowance": self.allowance, "boost": boost, **fair}


GATES: dict[str, type[Gate]] = {"strict": StrictGate, "fair": FairGate}


def attach(scheduler: Any) -> Gate:
    """Build the gate for ``scheduler`` (at the end of its construction), say so in the log, and return it."""
    config = scheduler.scheduler_config
    settings = Settings(os.environ, getattr(config, "max_num_partial_prefills", None))
    # What the engine made of its options, which it may have set aside; the fair gate replaces the threshold below.
    options = [getattr(config, name, 0) for name in ("long_prefill_token_threshold", "max_num_batched_tokens")]
    scheduler._dspark_max_inflight_prefills = settings.cap
    for line in settings.warnings:
        logger.warning("[issue27-hotfix] %s", line)
    if settings.off:
        logger.warning("[issue27-hotfix] off: DSPARK_PREFILL_HOTFIX_OFF is set")
        return Gate(scheduler, settings)
    gate = GATES[settings.policy](scheduler, settings)
    logger.info(
        "[issue27-hotfix] in-flight prefill cap=%d policy=%s diag=%d revision=%d threshold=%d budget=%d%s",
        settings.cap, settings.policy, settings.diag, REVISION, *options,
        f" allowance={gate.allowance}" if isinstance(gate, FairGate) else "",
    )  # fmt: skip
    return gate
