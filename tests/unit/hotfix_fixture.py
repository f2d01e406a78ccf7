"""A scheduler of our own in the shape of vLLM's: small enough to read, whole enough to run, for tests without vLLM."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = (ROOT / "patches/dspark_prefill.py").read_text(encoding="utf-8")

TOY = '''\
"""Schedules tokens."""
# vllm: tests/unit/hotfix_fixture.py


class Queue(list):
    def peek_request(self):
        return self[0]

    def pop_request(self):
        return self.pop(0)


class Manager:
    def allocate_slots(self, request, num_new_tokens):
        return [num_new_tokens]


class Scheduler:
    """Prompts in chunks, decodes one token at a time."""

    def __init__(self, scheduler_config, budget=100, threshold=0):
        self.scheduler_config = scheduler_config
        self.budget, self.threshold = budget, threshold
        self.max_num_running_reqs = 8
        self.max_model_len = 10_000
        self.lora_config = None
        self.kv_cache_manager = Manager()
        self.waiting = Queue()
        self.running = []  # in order of admission

    def schedule(self):
        """One step."""
        num_scheduled_tokens = {}
        token_budget = self.budget

        req_index = 0
        while req_index < len(self.running) and token_budget > 0:
            request = self.running[req_index]
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            if self.threshold:
                num_new_tokens = min(num_new_tokens, self.threshold)
            num_new_tokens = min(num_new_tokens, token_budget)
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            req_index += 1

        skipped = []
        while self.waiting and token_budget > 0:
            if len(self.running) >= self.max_num_running_reqs:
                break

            request = self.waiting.peek_request()
            if (
                self.lora_config
                and request.lora_request
            ):
                # Does not fit.
                self.waiting.pop_request()
                skipped.insert(0, request)
                continue

            load_kv_async = False
            num_computed_tokens = request.num_computed_tokens
            num_new_tokens = request.num_tokens - num_computed_tokens
            if self.threshold:
                num_new_tokens = min(num_new_tokens, self.threshold)
            if not load_kv_async:
                num_new_tokens = min(num_new_tokens, token_budget)
                assert num_new_tokens > 0

            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
            )
            if new_blocks is None:
                # Undo what the request holds.
                request.encoder = None
                break

            self.running.append(self.waiting.pop_request())
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens

        self.waiting[:0] = skipped
        for request in self.running:
            request.num_computed_tokens += num_scheduled_tokens.get(request.request_id, 0)
        return num_scheduled_tokens


def helper():
    return Scheduler
'''


# A scheduler that enforces a cap by itself, as a later vLLM may; ours, no release has it.
SYNTHETIC_WITH_CAP = TOY.replace(
    """
            request = self.waiting.peek_request()
""",
    """
            partial = sum(r.num_computed_tokens + num_scheduled_tokens.get(r.request_id, 0) < r.num_tokens
                          for r in self.running)
            if partial >= self.scheduler_config.max_num_partial_prefills:
                break

            request = self.waiting.peek_request()
""",
)


def install(site: Path, source: str = TOY, version: str = "0.99.0") -> Path:
    """Lay out a site-packages folder with ``source`` as its scheduler; returns that file."""
    folder = site / "vllm/v1/core/sched"
    folder.mkdir(parents=True)
    (site / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n", encoding="ascii")
    path = folder / "scheduler.py"
    path.write_bytes(source.encode())
    return path
