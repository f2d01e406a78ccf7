"""Run nccl-tests over all nodes as the service user: the head calls mpirun, the others start its daemon on request.

Every process is a transient unit of systemd with unlimited locked memory and a bounded time, so a run that hangs ends,
and nothing of it stays.
"""

from __future__ import annotations

import base64
import hashlib
import pkgutil
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import files, nccl, peer
from ansible.module_utils.sparkpair.facts import Run, sha256
from ansible.module_utils.sparkpair.service_command import service_command

RUNTIME = Path("/run/sparkpair-accept")
"""Folder of one run: the copy of peer.py that mpirun calls, and the secret."""

PROGRAM = "all_gather_perf"
TAIL = 30
"""Lines of a run's end that the report keeps."""

FIRST_S = 60.0
"""Seconds that head and peers wait for each other's first word: the nodes start the task a few seconds apart."""

OVER_S = 15.0
"""Seconds that the head tries to tell a peer that the run is over."""


@dataclass(frozen=True)
class Plan:
    """One run. `addresses` of rail 0 in rank order, `network` of rail 0 (CIDR), `hcas` of this node in rail order.

    `environment` is this node's, `folder` holds the program, `size` is in bytes, `seconds` bound one arm.
    """

    rank: int
    addresses: tuple[str, ...]
    network: str
    port: int
    secret: str
    user: str
    groups: tuple[str, ...]
    folder: Path
    hcas: tuple[str, ...]
    environment: Mapping[str, str]
    size: int
    iterations: int
    seconds: int
    arms: tuple[str, ...]


def as_service(plan: Plan, argv: Sequence[str], environment: Mapping[str, str], credential: Path | None) -> list[str]:
    """`argv` as a transient unit of the service user."""
    variables = {"HOME": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
    command: list[str] = service_command(plan.user, plan.groups, argv, plan.seconds, variables, credential)
    return command


def handler(plan: Plan, run: Run) -> peer.Handler:
    """What a peer does for the head: say which program it has, take another, change the arm, start the daemon."""
    arm = {"name": plan.arms[0]}
    program = plan.folder / PROGRAM

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        do = request.get("do")
        if do == "have":
            return {"status": 0, "out": sha256(program)}
        if do == "take":
            data = base64.b64decode(str(request["data"]))
            if hashlib.sha256(data).hexdigest() != request["sha256"]:
                raise peer.PeerError("a program that changed on its way")
            files.put(program, data, 0o755)
            return {"status": 0, "out": ""}
        if do == "arm" and request.get("name") in nccl.ARMS:
            arm["name"] = str(request["name"])
            return {"status": 0, "out": ""}
        if do == "daemon":
            command = peer.daemon_arguments([str(word) for word in request["command"]])
            environment = nccl.arm_environment(arm["name"], plan.environment, plan.hcas)
            status, out, err = run(as_service(plan, command, environment, None))
            return {"status": status, "out": out, "err": err}
        if do == "over":
            return {"status": 0, "out": ""}
        raise peer.PeerError(f"a request that is unknown ({do})")

    return answer


def listen(plan: Plan, run: Run) -> dict[str, Any]:
    """The part of a rank above 0. Raises PeerError when the head never asked or never ended the run."""
    server = peer.Server(plan.addresses[plan.rank], plan.port, plan.secret, handler(plan, run))
    bound = len(plan.arms) * (plan.seconds + 30)
    if not server.serve(FIRST_S, bound):
        said = "did not end its run" if server.asked.is_set() else "did not ask"
        raise peer.PeerError(
            f"the head {said} within {FIRST_S + bound:.0f} s on {plan.addresses[plan.rank]}:{plan.port}"
        )
    return {}


def bring_program(plan: Plan) -> list[str]:
    """Give every peer the head's program over the fabric; returns the addresses that lacked it. Raises PeerError."""
    program = plan.folder / PROGRAM
    digest, given = sha256(program), []
    if not digest:
        raise peer.PeerError(f"no {program} on the head")
    for address in plan.addresses[1:]:
        if peer.ask(address, plan.port, plan.secret, {"do": "have"}, wait=FIRST_S).get("out") != digest:
            data = base64.b64encode(program.read_bytes()).decode()
            message = {"do": "take", "sha256": digest, "data": data}
            if (answer := peer.ask(address, plan.port, plan.secret, message)).get("status") != 0:
                raise peer.PeerError(f"{address} did not take {program}: {answer.get('err')}")
            given.append(address)
    return given


def run_arm(plan: Plan, run: Run, arm: str, clock: Any = time.monotonic) -> dict[str, Any]:
    """One arm on all nodes: verdict, figures, the command and the end of its output."""
    for address in plan.addresses[1:]:
        peer.ask(address, plan.port, plan.secret, {"do": "arm", "name": arm})
    program = nccl.command(str(plan.folder / PROGRAM), plan.size, plan.iterations)
    argv = nccl.mpirun(plan.addresses, plan.network, program)
    environment = {
        **nccl.arm_environment(arm, plan.environment, plan.hcas),
        nccl.MPI_AGENT: f"/usr/bin/python3 {RUNTIME / 'peer.py'}",
        "SPARKPAIR_PEER_PORT": str(plan.port),
    }
    started = clock()
    _, out, err = run(as_service(plan, argv, environment, RUNTIME / "secret"))
    seconds = clock() - started
    text = f"{err}\n{out}"
    bench: nccl.Bench | None = None
    if seconds >= plan.seconds:
        verdict = nccl.failed("hang", f"no result within {plan.seconds} s")
    else:
        try:
            bench = nccl.parse(text, len(plan.addresses))
            verdict = nccl.judge(bench, len(plan.hcas))
        except nccl.NcclError as error:
            verdict = nccl.failed(error.verdict, str(error))
    return {
        "verdict": verdict.as_dict(),
        "bench": asdict(bench) if bench else None,
        "seconds": round(seconds, 1),
        "command": " ".join(argv),
        "tail": text.splitlines()[-TAIL:],
    }


def own_source() -> bytes:
    """The text of peer.py, also from the archive in which Ansible sends it to the node."""
    return pkgutil.get_data("ansible.module_utils.sparkpair", "peer.py") or b""


def lead(plan: Plan, run: Run) -> dict[str, Any]:
    """The part of rank 0: every arm in turn. Raises PeerError when a peer does not answer."""
    RUNTIME.mkdir(mode=0o755, exist_ok=True)
    try:
        files.put(RUNTIME / "peer.py", own_source(), 0o644)
        files.put(RUNTIME / "secret", plan.secret.encode(), 0o400)
        given = bring_program(plan)
        arms = {arm: run_arm(plan, run, arm) for arm in plan.arms}
        return {"arms": arms, "given": given}
    finally:
        shutil.rmtree(RUNTIME, ignore_errors=True)
        for address in plan.addresses[1:]:
            try:
                # A run that failed at once may be over before a peer listens.
                peer.ask(address, plan.port, plan.secret, {"do": "over"}, wait=OVER_S)
            except peer.PeerError:
                continue  # it ended by itself and says so
