"""Measure the rails between the head and every other node: each alone, then all at once.

One task runs on all nodes: peers start the servers, the head the clients. Everything is bounded in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import perftest
from ansible.module_utils.sparkpair.facts import Run
from ansible.module_utils.sparkpair.perftest import PerftestError

PATIENCE = 30.0
"""Seconds that either side waits for the other: the nodes start the task a few seconds apart."""

Wrap = Callable[[Sequence[str], int], Sequence[str]]
"""Makes a command one of the service user with a bound in seconds."""


@dataclass(frozen=True)
class Plan:
    """`rails` as fabric_info returns them, `nodes` in all, `seconds` of one measurement, `sysfs` its root."""

    rank: int
    nodes: int
    rails: tuple[Mapping[str, Any], ...]
    seconds: int
    sysfs: Path


def rounds(plan: Plan) -> list[tuple[Mapping[str, Any], ...]]:
    """What is measured one after another: each rail alone, then all."""
    alone: list[tuple[Mapping[str, Any], ...]] = [(rail,) for rail in plan.rails]
    return [*alone, tuple(plan.rails)]


def port(plan: Plan, peer: int, number: int, rail: int) -> int:
    """TCP port of one measurement; no two of a run share one."""
    per_peer = (len(plan.rails) + 1) * len(plan.rails)
    first: int = perftest.PORT
    return first + (peer - 1) * per_peer + number * len(plan.rails) + rail


def gid_of(plan: Plan, rail: Mapping[str, Any]) -> int:
    """This node's GID index on a rail. Raises PerftestError when its address has none."""
    address = rail["addresses_by_rank"][plan.rank]
    index: int | None = perftest.gid_index(plan.sysfs, rail["hca"], address)
    if index is None:
        raise PerftestError(f"{rail['hca']} has no RoCE v2 GID of {address}")
    return index


def serve(plan: Plan, run: Run, wrap: Wrap) -> None:
    """The part of a rank above 0: one server for each measurement, all waiting from the start.

    A server ends after its one client, or when its bound is over.
    """
    todo = [(number, rail) for number, rails in enumerate(rounds(plan)) for rail in rails]
    bound = int(PATIENCE + (plan.nodes - 1) * (len(plan.rails) + 1) * (plan.seconds + PATIENCE))
    with ThreadPoolExecutor(len(todo)) as pool:
        for number, rail in todo:
            at = port(plan, plan.rank, number, int(rail["rail"]))
            pool.submit(run, wrap(perftest.command(rail, gid_of(plan, rail), at, plan.seconds), bound))


def measure(plan: Plan, run: Run, wrap: Wrap, peer: int, number: int, rail: Mapping[str, Any]) -> dict[str, Any]:
    """One client on the head, asked again until its server is there. Raises PerftestError."""
    at = port(plan, peer, number, int(rail["rail"]))
    target = rail["addresses_by_rank"][peer]
    argv = perftest.command(rail, gid_of(plan, rail), at, plan.seconds, target)
    deadline = time.monotonic() + PATIENCE
    while True:
        status, out, err = run(wrap(argv, plan.seconds + 20))
        if status == 0 or "connect" not in (out + err).lower() or time.monotonic() > deadline:
            break
        time.sleep(1)
    try:
        return asdict(perftest.parse(out))
    except PerftestError as error:
        detail = " ".join(err.split())[-200:]
        raise PerftestError(f"rail {rail['rail']} to {target}: {error} {detail}".strip()) from error


def lead(plan: Plan, run: Run, wrap: Wrap) -> list[dict[str, Any]]:
    """The part of rank 0: figures of every peer, rails in order. Raises PerftestError."""
    found = []
    for peer in range(1, plan.nodes):
        results = []
        for number, rails in enumerate(rounds(plan)):
            with ThreadPoolExecutor(len(rails)) as pool:
                futures = [pool.submit(measure, plan, run, wrap, peer, number, rail) for rail in rails]
                results.append([future.result() for future in futures])
        alone, together = [result[0] for result in results[:-1]], results[-1]
        verdict, remedy = perftest.judge([one["gbits"] for one in alone], [one["gbits"] for one in together])
        found.append({"peer": peer, "alone": alone, "together": together, "verdict": verdict, "remedy": remedy})
    return found
