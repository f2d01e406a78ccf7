"""What the fabric's tests do with the lab: commands as root on a node, pictures of a node, plays that are watched."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from test_demo import LAB_DIR, ROOT

IDENT = os.environ.get("LAB_ID") or "sparkpair"
STATE = Path(LAB_DIR) if "LAB_DIR" in os.environ or IDENT == "sparkpair" else ROOT / ".lab" / IDENT
NODES = ("spark-a", "spark-b")
RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")
NAME = "sparkpair-lab" if IDENT == "sparkpair" else f"sparkpair-lab-{IDENT}"
"""What the lab's names in the kernel begin with."""
JOURNAL = "var/lib/sparkpair"

PICTURE = """
for file in $(find /etc/netplan /etc/hosts /etc/sysctl.d /etc/sparkpair /etc/systemd/system /etc/ufw/*.rules \
    /etc/NetworkManager/system-connections /var/lib/sparkpair ! -type d 2>/dev/null | sort); do
  stat -c '%n %a %U %F' "$file"; sha256sum <"$file" 2>/dev/null
done
nft list ruleset
for rail in enp1s0f0np0 enP2p1s0f0np0; do
  ip -4 -br address show dev $rail | tr -d ' '
  cat /sys/class/net/$rail/mtu /proc/sys/net/ipv4/conf/$rail/arp_ignore /proc/sys/net/ipv4/conf/$rail/arp_announce
done
"""
"""Everything that the fabric may touch on a node."""


def root(node: str, script: str) -> str:
    """Run a script as root on a node and return what it printed; fails when it fails."""
    password = (STATE / "become_password").read_text().strip()
    command = f"cat >/tmp/script; echo {password} | sudo -S -p '' sh -eu /tmp/script"
    done = subprocess.run(
        ["python3", str(ROOT / "lab/lab.py"), "ssh", node, command],
        input=script, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{node}: {script}\n{done.stdout}{done.stderr}"
    return done.stdout


def picture(node: str) -> str:
    return root(node, PICTURE)


def ip(node: str, *command: str) -> str:
    """`ip` in a node's network namespace, from outside: works without SSH, and while the node is cut off."""
    done = subprocess.run(["ip", "-n", f"{NAME}-{node}", *command], capture_output=True, text=True, check=False)
    return done.stdout


def addressed(node: str) -> bool:
    return any("192.168.17" in ip(node, "-4", "-br", "address", "show", "dev", rail) for rail in RAILS)


def journal(node: str) -> bool:
    """Whether a plan waits for its confirmation, read from the node's disk."""
    return (STATE / node / "upper" / JOURNAL).exists()


def wait(what, seconds: float) -> float:
    """Wait until `what()` is true; returns the seconds that it took."""
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < seconds, f"still not so after {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - started
