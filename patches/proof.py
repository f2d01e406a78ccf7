"""Prove that the installed scheduler keeps the cap, starves no decode lane and finishes every request.

Run by the interpreter of a vLLM environment: it builds the real ``Scheduler`` and ``AsyncScheduler`` on the CPU, with a
tiny model configuration, and plays a model that answers at once. No weights, no GPU, no network. What the workloads
show is counted here, from the requests themselves, not taken from the gate.

    VENV/bin/python proof.py [--json] [--stamp FILE]

Exit 0: proven. 1: not; the report names what was seen. With ``--stamp`` the report of a success is left in FILE.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 32000,
    "max_position_embeddings": 2097152, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
BLOCK = 64  # tokens in a KV cache block
PREFIX = "DSPARK_"


@dataclass
class Seen:
    """What one run showed. Times are in the units of the clock that the run was given (steps, by default)."""

    steps: int = 0  # calls of schedule()
    time: float = 0.0
    partial: int = 0  # most partial prefills at once
    skips: list[tuple[int, str]] = field(default_factory=list)  # step and name of a lane that was due and got nothing
    unfinished: list[str] = field(default_factory=list)  # still there when nothing moved any more
    preempted: int = 0  # requests that were preempted at least once
    mixed_prefill: int = 0  # most prefill tokens in a step that also decoded
    arrived: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    last_token: dict[str, float] = field(default_factory=dict)
    worst_gap: dict[str, float] = field(default_factory=dict)  # longest time between two tokens of a request

    def note(self, due: list[str], scheduled: Mapping[str, int], scheduler: Any, *, preempting: bool) -> None:
        """Count what the step that ``scheduler`` just made did to the lanes that were ``due`` before it.

        A lane that gets nothing in a step that preempted somebody lacked KV cache, not its turn.
        """
        if scheduled and not preempting:
            self.skips += [(self.steps, name) for name in due if name not in scheduled]
        self.partial = max(self.partial, partial_prefills(scheduler))
        if any(name in scheduled for name in due):
            self.mixed_prefill = max(self.mixed_prefill, sum(n for r, n in scheduled.items() if r not in due))

    def emit(self, names: Iterable[str]) -> None:
        """Tokens of these requests appear at the end of the step."""
        for name in names:
            if name in self.last_token:
                gap = self.time - self.last_token[name]
                self.worst_gap[name] = max(self.worst_gap.get(name, 0.0), gap)
            else:
                self.first_token[name] = self.time
            self.last_token[name] = self.time

    def ttft(self, prefix: str = "") -> float:
        """Mean time to the first token of the requests whose name begins with ``prefix``."""
        times = [t - self.arrived[name] for name, t in self.first_token.items() if name.startswith(prefix)]
        return sum(times) / len(times) if times else 0.0

    def gap(self, prefix: str = "") -> float:
        """Longest time between two tokens of any request whose name begins with ``prefix``."""
        return max((g for name, g in self.worst_gap.items() if name.startswith(prefix)), default=0.0)


class Rig:
    """The real scheduler classes of the vLLM on ``sys.path``, built for a model of a few kilobytes."""

    def __init__(self) -> None:
        """Import vLLM for the CPU. Takes about ten seconds and sets environment variables of this process."""
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="", VLLM_CPU_KVCACHE_SPACE="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import platforms
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()  # also where vLLM was built for a GPU: nothing here runs on one
        import torch
        import vllm
        from vllm.v1.core.sched import async_scheduler, scheduler

        self.torch = torch
        self.version: str = vllm.__version__
        self.classes: dict[bool, Any] = {False: scheduler.Scheduler, True: async_scheduler.AsyncScheduler}
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-proof-")
        (Path(self._folder.name) / "config.json").write_text(json.dumps(MODEL), encoding="ascii")
        self._models: dict[int, Any] = {}
        self._hash: Callable[[Any], bytes] | None = None

    def scheduler(
        self,
        *,
        asynchronous: bool = False,
        budget: int = 8192,
        seqs: int = 16,
        threshold: int = 0,
        blocks: int = 60000,
        policy: str = "fcfs",
        caching: bool = False,
        drafts: int = 0,
        max_len: int = 1_000_000,
    ) -> Any:
        """Build a scheduler. Budget, threshold and lengths are in tokens, ``blocks`` of 64 tokens."""
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        if max_len not in self._models:
            self._models[max_len] = ModelConfig(
                model=self._folder.name, skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=max_len
            )
        wanted = {
            "max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_model_len": max_len, "policy": policy,
            "is_encoder_decoder": False, "enable_chunked_prefill": True, "async_scheduling": asynchronous,
            "long_prefill_token_threshold": threshold,
        }  # fmt: skip
        known = SchedulerConfig.__dataclass_fields__
        config = VllmConfig(
            model_config=self._models[max_len],
            scheduler_config=SchedulerConfig(**{k: v for k, v in wanted.items() if k in known}),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        )
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.block_size = BLOCK
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.async_scheduling = asynchronous
        if hasattr(config.scheduler_config, "max_num_scheduled_tokens"):
            config.scheduler_config.max_num_scheduled_tokens = None
        spec = _call(
            FullAttentionSpec,
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=self.torch.float32, use_mla=False,
        )  # fmt: skip
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        scheduler = _call(
            self.classes[asynchronous],
            vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, log_stats=False,
        )  # fmt: skip
        if drafts:
            scheduler.num_spec_tokens = drafts
            if hasattr(scheduler, "_spec_token_placeholders"):
                scheduler._spec_token_placeholders = [-1] * drafts
        return scheduler

    def request(
        self,
        name: str,
        prompt: int | list[int],
        out: int,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        caching: bool = False,
    ) -> Any:
        """A request of ``prompt`` tokens (or these token ids) that ends after ``out`` tokens."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        hasher = None
        if caching:
            from vllm.utils.hashing import sha256
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

            if self._hash is None:
                init_none_hash(sha256)
                self._hash = sha256
            hasher = get_request_block_hasher(BLOCK, self._hash)
        return _call(
            Request,
            request_id=name, prompt_token_ids=prompt if isinstance(prompt, list) else [7] * prompt,
            sampling_params=SamplingParams(max_tokens=out, ignore_eos=True), pooling_params=None, eos_token_id=None,
            mm_features=None, priority=priority, arrival_time=arrival or time.time(), block_hasher=hasher,
        )  # fmt: skip

    def output(self, scheduled: Any, sampled: Mapping[str, list[int]], kv: Any = None) -> Any:
        """The model's answer to a step: ``sampled`` tokens by request."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        return _call(
            ModelRunnerOutput,
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, logprobs=None, prompt_logprobs_dict={},
            sampled_token_ids=[sampled.get(r, []) for r in ids], pooler_output=[], kv_connector_output=kv,
        )  # fmt: skip


def _call(target: Any, **arguments: Any) -> Any:
    """Call ``target`` with those of ``arguments`` that it takes in this release."""
    classes = target.__mro__ if isinstance(target, type) else (target,)
    taken = {name for c in classes for name in inspect.signature(c).parameters} - {"args", "kwargs"}
    return target(**{k: v for k, v in arguments.items() if k in taken})


def partial_prefills(scheduler: Any) -> int:
    """Running requests with prompt, or output to replay, that no step was scheduled for yet."""
    return sum(
        r.num_tokens - r.num_computed_tokens > (1 if r.num_tokens > r.num_prompt_tokens else 0)
        for r in scheduler.running
    )


def due_decodes(scheduler: Any) -> list[str]:
    """Running requests past their prompt that must get a token in the next step."""
    due = []
    for r in scheduler.running:
        placeholders = getattr(r, "num_output_placeholders", 0)
        pending = r.num_tokens + placeholders - r.num_computed_tokens
        ending = placeholders > 0 and r.num_computed_tokens + 2 - placeholders >= r.num_prompt_tokens + r.max_tokens
        if (
            1 <= pending <= 1 + scheduler.num_spec_tokens
            and r.num_computed_tokens >= r.num_prompt_tokens
            and not ending
        ):
            due.append(r.request_id)
    return due


def one_per_step(_prefill: int, _decode: int) -> float:
    """The plainest clock: a step takes one unit of time, whatever is in it."""
    return 1.0


def drive(
    rig: Rig,
    scheduler: Any,
    arrivals: Sequence[tuple[float, Any]],
    *,
    asynchronous: bool = False,
    seed: int = 0,
    max_steps: int = 200_000,
    clock: Callable[[int, int], float] = one_per_step,
    answer: Callable[[Any, Mapping[str, list[int]], int], Any] | None = None,
) -> Seen:
    """Run ``arrivals`` (time, request) to the end, with two steps in flight when ``asynchronous``.

    ``clock(prefill, decode)`` says how long a step of so many tokens takes. Where the scheduler takes draft tokens,
    ``seed`` decides how many of them are accepted. ``answer(scheduled, sampled, step)`` may build the model's answer,
    to add what a KV connector would report.
    """
    waiting = deque(sorted(arrivals, key=lambda a: a[0]))
    requests = {r.request_id: r for _, r in arrivals}
    answer = answer or (lambda scheduled, sampled, _step: rig.output(scheduled, sampled))
    flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
    seen, still, accept = Seen(), 0, random.Random(seed)
    while (waiting or scheduler.has_unfinished_requests()) and seen.steps < max_steps and still < 200:
        if not scheduler.has_unfinished_requests():
            seen.time = max(seen.time, waiting[0][0])
        while waiting and waiting[0][0] <= seen.time + 1e-9:
            when, request = waiting.popleft()
            seen.arrived[request.request_id] = when
            scheduler.add_request(request)
        seen.steps += 1
        due, before = due_decodes(scheduler), set(scheduler.running)
        out = scheduler.schedule()
        scheduled = out.num_scheduled_tokens
        seen.note(due, scheduled, scheduler, preempting=not before.issubset(scheduler.running))
        decode = sum(scheduled.get(name, 0) for name in due)
        seen.time += clock(sum(scheduled.values()) - decode, decode) if scheduled else 1.0
        drafts = out.scheduled_spec_decode_tokens
        sampled = {
            name: [11] * (1 + accept.randint(0, len(drafts.get(name, ()))))
            for name in scheduled
            if requests[name].num_computed_tokens >= requests[name].num_tokens
        }
        seen.emit(sampled)
        flight.append((out, sampled))
        while len(flight) > (1 if asynchronous and scheduled else 0):
            done, tokens = flight.popleft()
            scheduler.update_from_output(done, answer(done, tokens, seen.steps))
            if scheduler.num_spec_tokens and not asynchronous:
                for r in (requests[name] for name in tokens if not requests[name].is_finished()):
                    r.spec_token_ids = [5] * min(scheduler.num_spec_tokens, scheduler.max_model_len - r.num_tokens - 2)
        still = 0 if scheduled or waiting else still + 1
    seen.preempted = sum(r.num_preemptions > 0 for r in requests.values())
    seen.unfinished = sorted(name for name, r in requests.items() if not r.is_finished())
    return seen


class LoadingConnector:
    """Stands in for a KV connector that fetches the cache of requests named ``load…`` in the background.

    Only what the scheduler calls on the way of such a request is there; anything else answers None.
    """

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(self) -> None:
        self.loading: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        tokens = request.num_tokens - 1 - computed
        return (tokens, True) if request.request_id.startswith("load") and tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, _blocks: Any, external: int) -> None:
        if external:
            self.loading.setdefault(request.request_id, 0)

    def request_finished(self, *_: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    def get_loaded_kv_cache_group_ids(self, *_: Any) -> tuple[()]:
        return ()

    def take_events(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def drive_loads(rig: Rig, *, loads: int, prompts: int, after: int = 20) -> Seen:
    """``loads`` requests whose KV cache takes ``after`` steps to arrive, then ``prompts`` ordinary ones behind them."""
    from vllm.v1.outputs import KVConnectorOutput

    scheduler = rig.scheduler(budget=2048)
    connector = scheduler.connector = LoadingConnector()
    arrivals = [(0, rig.request(f"load{i}", 4000, 4)) for i in range(loads)]
    arrivals += [(2, rig.request(f"prompt{i}", 6000, 4)) for i in range(prompts)]

    def answer(scheduled: Any, sampled: Mapping[str, list[int]], step: int) -> Any:
        ready = set()
        for name in list(connector.loading):
            connector.loading[name] += 1
            if connector.loading[name] >= after:
                ready.add(name)
                del connector.loading[name]
        kv = _call(KVConnectorOutput, finished_recving=ready) if ready else None
        return rig.output(scheduled, sampled, kv)

    return drive(rig, scheduler, arrivals, answer=answer)


@contextmanager
def settings(**values: str) -> Iterator[None]:
    """Give the gate these ``DSPARK_`` variables and no others."""
    before = {k: v for k, v in os.environ.items() if k.startswith(PREFIX)}
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        for name in [k for k in os.environ if k.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update(before)


def cold_lanes(rig: Rig) -> list[tuple[float, Any]]:
    """Six equal prompts at once."""
    return [(0, rig.request(f"lane{i}", 16384, 32)) for i in range(6)]


def live_and_long(rig: Rig) -> list[tuple[float, Any]]:
    """Four live streams, then two long prompts, with a short one every few steps."""
    work = [(0, rig.request(f"live{i}", 200, 120)) for i in range(4)]
    work += [(4 + i, rig.request(f"long{i}", 40_000, 8)) for i in range(2)]
    return work + [(6 + 6 * i, rig.request(f"short{i}", 400, 8)) for i in range(8)]


def prove(rig: Rig) -> dict[str, Any]:
    """Run every workload under every policy and collect what contradicts the promise (``failures``)."""
    from_gate = getattr(rig.scheduler(), "_dspark_max_inflight_prefills", None)
    if from_gate is None:
        return {"proven": False, "vllm_version": rig.version, "failures": ["the scheduler is not patched"], "runs": []}
    failures: list[str] = []
    runs: list[dict[str, Any]] = []
    for policy, cap in (("strict", 1), ("strict", 2), ("fair", 1), ("fair", 2)):
        env = {"DSPARK_MAX_INFLIGHT_PREFILLS": str(cap), "DSPARK_PREFILL_POLICY": policy}
        for asynchronous in (False, True):
            for workload in (cold_lanes, live_and_long):
                title = f"{workload.__name__} {policy} cap={cap} {'async' if asynchronous else 'sync'}"
                with settings(**env):
                    scheduler = rig.scheduler(asynchronous=asynchronous, threshold=1024)
                    seen = drive(rig, scheduler, workload(rig), asynchronous=asynchronous)
                if scheduler._dspark_max_inflight_prefills != cap:
                    failures.append(f"{title}: the cap in force is {scheduler._dspark_max_inflight_prefills}")
                if policy == "fair" and seen.mixed_prefill > 1024:
                    failures.append(f"{title}: {seen.mixed_prefill} prefill tokens beside decodes, 1024 are allowed")
                failures += _contradictions(title, seen, cap)
                runs.append(_row(title, seen))
        title = f"loads {policy} cap={cap}"
        with settings(**env):
            seen = drive_loads(rig, loads=cap + 1, prompts=3)
        failures += _contradictions(title, seen, cap)
        runs.append(_row(title, seen))
    with settings(DSPARK_PREFILL_HOTFIX_OFF="1"):
        stock = drive(rig, rig.scheduler(threshold=1024), cold_lanes(rig))
    runs.append(_row("cold_lanes stock", stock))
    return {
        "proven": not failures,
        "vllm_version": rig.version,
        "failures": failures,
        "stock_would_exceed": stock.partial > 1,
        "runs": runs,
    }


def _contradictions(title: str, seen: Seen, cap: int) -> list[str]:
    found = []
    if seen.partial > cap:
        found.append(f"{title}: {seen.partial} partial prefills at once, the cap is {cap}")
    if seen.skips:
        step, name = seen.skips[0]
        found.append(f"{title}: {len(seen.skips)} decode lanes skipped, first {name} in step {step}")
    if seen.unfinished:
        found.append(f"{title}: never finished: {', '.join(seen.unfinished)}")
    return found


def _row(title: str, seen: Seen) -> dict[str, Any]:
    return {
        "run": title, "steps": seen.steps, "max_partial": seen.partial, "decode_skips": len(seen.skips),
        "unfinished": len(seen.unfinished), "max_mixed_prefill_tokens": seen.mixed_prefill,
    }  # fmt: skip


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--stamp", type=Path, help="write the report there when everything is proven")
    args = parser.parse_args()
    began = time.monotonic()
    report = prove(Rig())
    report["seconds"] = round(time.monotonic() - began, 1)
    stock = "fails it" if report.get("stock_would_exceed") else "passes it too: nothing is shown"
    report["verdict"] = f"proven on vLLM {report['vllm_version']} in {report['seconds']} s; the stock scheduler {stock}"
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for row in report["runs"]:
            print("{run:36} steps={steps} max_partial={max_partial} decode_skips={decode_skips}".format(**row))
        print("\n".join(report["failures"]) or report["verdict"])
    if report["proven"] and args.stamp:
        args.stamp.parent.mkdir(parents=True, exist_ok=True)
        args.stamp.write_text(json.dumps(report) + "\n", encoding="utf-8")
    return 0 if report["proven"] else 1


if __name__ == "__main__":
    sys.exit(main())
