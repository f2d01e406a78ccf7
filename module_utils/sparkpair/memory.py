"""The memory policy of a node: 128 GB are shared by CPU, GPU, page cache and shared memory.

Numbers from public reports: earlyoom kills healthy launches at its own 10 %/5 %, and works at 2 % of memory with 80 %
of swap; page cache counts as used when an engine asks for free GPU memory, so it is dropped right before a start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEADER = "# Managed by sparkpair.\n"
SYSCTL = "etc/sysctl.d/90-sparkpair-memory.conf"
LOGIND = "etc/systemd/logind.conf.d/90-sparkpair.conf"
PAGE_CACHE = "etc/systemd/system/sparkpair-rank.service.d/10-page-cache.conf"
PAGE_CACHE_SOCKET = "etc/systemd/system/sparkpair-page-cache.socket"
PAGE_CACHE_SERVICE = "etc/systemd/system/sparkpair-page-cache@.service"
EARLYOOM = "etc/default/earlyoom"
SWAPPINESS = "proc/sys/vm/swappiness"

RELOAD = ("systemctl", "daemon-reload")
APPLY: Mapping[str, tuple[str, ...]] = {
    SYSCTL: ("sysctl", "-q", "-p", f"/{SYSCTL}"),
    LOGIND: ("systemctl", "kill", "--kill-whom=main", "--signal=HUP", "systemd-logind.service"),
    PAGE_CACHE_SOCKET: RELOAD,
    PAGE_CACHE_SERVICE: RELOAD,
    PAGE_CACHE: RELOAD,
    EARLYOOM: ("systemctl", "try-restart", "earlyoom.service"),
}
"""What makes a changed file count without a reboot; none of them stops a running engine."""


@dataclass(frozen=True)
class Policy:
    """`swappiness` (-1 leaves it), `earlyoom` arguments (empty leaves it), the other two on or off."""

    swappiness: int
    earlyoom: str
    drop_caches: bool
    keep_ipc: bool
    user: str = "sparkpair"
    """Who may have the page cache dropped: the user of the rank."""


def page_cache_units(user: str) -> dict[str, str]:
    """Units that let an agent without privileges drop the page cache before each generation of vLLM.

    A connection to the socket starts the service, which ends it when it is done. Nothing is read from it.
    """
    socket = f"""[Unit]
Description=Where the rank's agent has the page cache dropped
Documentation=file:/usr/local/lib/sparkpair/sparkpair_rank/page_cache.py

[Socket]
ListenStream=/run/sparkpair-page-cache.sock
SocketUser={user}
SocketMode=0600
Accept=true
MaxConnections=1
RemoveOnStop=true
"""
    service = """[Unit]
Description=Drop the page cache, which counts as used when vLLM asks for free memory
CollectMode=inactive-or-failed

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'sync; echo 3 >/proc/sys/vm/drop_caches'
TimeoutStartSec=60
# Root owns the file; nothing else of root's is needed.
CapabilityBoundingSet=
LockPersonality=true
MemoryDenyWriteExecute=true
NoNewPrivileges=true
PrivateDevices=true
PrivateNetwork=true
PrivateTmp=true
ProtectClock=true
InaccessiblePaths=/sys/fs/cgroup
ProtectHome=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectSystem=strict
RestrictAddressFamilies=none
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
UMask=0077
# Left open on purpose: ProtectKernelTunables and ProtectProc, since the file is in /proc.
"""
    wants = "[Unit]\nWants=sparkpair-page-cache.socket\nAfter=sparkpair-page-cache.socket\n"
    return {
        PAGE_CACHE_SOCKET: HEADER + socket,
        PAGE_CACHE_SERVICE: HEADER + service,
        PAGE_CACHE: HEADER + wants,
    }


def set_earlyoom(text: str, arguments: str) -> str:
    """Text of /etc/default/earlyoom with its arguments replaced, everything else as it was."""
    line = f'EARLYOOM_ARGS="{arguments}"'
    new, count = re.subn(r"(?m)^EARLYOOM_ARGS=.*$", lambda _: line, text)
    return new if count else f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n"


def wanted(policy: Policy, root: Path) -> dict[str, bytes | None]:
    """What each file must hold, None for absent. earlyoom is configured where it is installed, never installed."""
    files: dict[str, str | None] = {
        SYSCTL: f"{HEADER}vm.swappiness = {policy.swappiness}\n" if policy.swappiness >= 0 else None,
        LOGIND: f"{HEADER}[Login]\nRemoveIPC=no\n" if policy.keep_ipc else None,
        **{name: text if policy.drop_caches else None for name, text in page_cache_units(policy.user).items()},
    }
    earlyoom = root / EARLYOOM
    if policy.earlyoom and earlyoom.is_file():
        files[EARLYOOM] = set_earlyoom(earlyoom.read_text(), policy.earlyoom)
    return {name: None if text is None else text.encode() for name, text in files.items()}


def swappiness_drifted(policy: Policy, root: Path) -> bool:
    """Whether the running kernel has another swappiness than the policy."""
    try:
        return policy.swappiness >= 0 and (root / SWAPPINESS).read_text().strip() != str(policy.swappiness)
    except OSError:
        return False
