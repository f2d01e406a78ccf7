"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab import host, leftovers, lifecycle
from lab.settings import LabError, Settings, read_settings

DESCRIPTION = """\
Two simulated DGX Sparks on this machine: systemd hosts in network namespaces of their own.

Environment: LAB_ID (name of the lab, default sparkpair), LAB_NODES (2 or 3), LAB_RING (set: three nodes in a ring),
LAB_DIR (state, default .lab), LAB_CACHE_DIR (built parts, default .cache), LAB_DEBIAN_MIRROR (else debootstrap's)."""

VERBS = {
    "check": "say at once whether this machine can hold a lab; changes nothing",
    "build": "build the parts that are missing in the cache (and install what this machine lacks)",
    "up": "boot the nodes, building what is missing; keeps a lab that already runs",
    "reset": "throw the nodes away and boot fresh ones",
    "down": "remove everything but the cache; --force also takes a living lab of another folder",
    "status": "say which nodes run; exit 0 if all do",
    "leftovers": "list everything that exists of the lab on this machine; exit 1 if there is anything",
    "ssh": "log in to NODE as its user, or run a command there",
    "kill": "cut the power of NODE",
    "start": "switch NODE on again",
    "run": "run a command in the network namespace on the lab's side of the management network",
}
NEEDS_ROOT = ("check", "build", "up", "reset", "down", "ssh", "kill", "start", "run", "supervise")


def parser() -> argparse.ArgumentParser:
    """The argument parser; `supervise` is what `up` starts in the background and is not listed."""
    top = argparse.ArgumentParser(
        prog="lab.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text)
        if verb in ("ssh", "kill", "start"):
            sub.add_argument("node", metavar="NODE")
        if verb in ("ssh", "run"):
            sub.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER)
        if verb == "down":
            sub.add_argument("--force", action="store_true")
    verbs.add_parser("supervise").add_argument("node")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    options = parser().parse_args(arguments)
    # `su` keeps a user's PATH, and what the lab calls is in sbin.
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        host.require_linux()
        if options.verb in NEEDS_ROOT:
            host.require_root(options.verb)
        return dispatch(options, read_settings())
    except (LabError, OSError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; `lab.py down` removes what is there", file=sys.stderr)
        return 130


def dispatch(options: argparse.Namespace, settings: Settings) -> int:
    """Call the verb's function; raises LabError."""
    verb: str = options.verb
    if verb == "check":
        host.require_installable()
        return 0
    if verb in ("ssh", "kill", "start"):
        settings = lifecycle.as_running(settings)
    if verb == "status":
        return 0 if lifecycle.status(settings) else 1
    if verb == "leftovers":
        lines = leftovers.find(settings)
        print("\n".join(lines) if lines else f"nothing is left of lab '{settings.ident}'")
        return 1 if lines else 0
    if verb == "ssh":
        node = settings.node(options.node)
        lifecycle.require_own(settings)
        return become(["ssh", "-F", str(settings.state / "ssh_config"), node.name, *options.command])
    if verb == "run":
        lifecycle.require_own(settings)
        if not options.command:
            raise LabError("`lab.py run` needs a command")
        return become(["nsenter", f"--net=/run/netns/{settings.lab_namespace}", *options.command])
    if verb == "supervise":
        lifecycle.supervise(settings, settings.node(options.node))
        return 0
    with host.lock(Path(f"/run/{settings.name}.lock"), verb):
        if verb == "build":
            lifecycle.build(settings)
            host.step(f"all parts are in {settings.cache}")
        elif verb == "up":
            lifecycle.up(settings)
        elif verb == "reset":
            lifecycle.reset(settings)
        elif verb == "down":
            lifecycle.down(settings, options.force)
        elif verb == "kill":
            lifecycle.kill(settings, settings.node(options.node))
        elif verb == "start":
            lifecycle.start(settings, settings.node(options.node))
    return 0


def become(command: Sequence[str]) -> int:
    """Become `command`; raises LabError if it does not exist."""
    sys.stdout.flush()
    try:
        os.execvp(command[0], list(command))
    except FileNotFoundError as error:
        raise LabError(f"'{command[0]}' is not on this machine") from error
