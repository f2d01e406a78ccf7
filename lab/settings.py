"""What the lab consists of: names, addresses, cables and folders. Pure data, nothing is touched here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout that this file is part of."""

DEFAULT_ID = "sparkpair"
MANAGEMENT = "enP7s7"
RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")
"""The twins of the cabled cage, domain 0000 first."""
EMPTY_CAGE = ("enp1s0f1np1", "enP2p1s0f1np1")
"""The twins of the cage without a cable: present, never with a carrier."""
INTERFACES = (MANAGEMENT, *RAILS, *EMPTY_CAGE)
MANAGEMENT_NETWORK = "10.77.0"
"""First three bytes of the management /24; it exists inside the lab's own namespaces only."""


class LabError(Exception):
    """Something the user has to know or do; the text is the whole message."""


@dataclass(frozen=True)
class Node:
    """One simulated Spark. `index` is its rank: 0 for the head."""

    index: int

    @property
    def name(self) -> str:
        return f"spark-{'abc'[self.index]}"

    @property
    def address(self) -> str:
        """Management address, without prefix length."""
        return f"{MANAGEMENT_NETWORK}.{self.index + 1}"

    def mac(self, interface: str) -> str:
        """Hardware address. Given at creation it counts as set by the user, so udev leaves it alone."""
        number = self.index + 1
        if interface == MANAGEMENT:
            return f"02:77:00:00:01:{number:02x}"
        return f"4c:bb:47:00:{number:02x}:{(RAILS + EMPTY_CAGE).index(interface) + 1:02x}"

    def parked(self, interface: str) -> str:
        """Name of the interface while it waits in the park namespace (the kernel allows 15 characters)."""
        return f"{self.index}-{interface}"


@dataclass(frozen=True)
class Settings:
    """One lab. `name`, made of `ident`, begins all that it makes in the kernel and in /run: labs live side by side."""

    ident: str
    count: int
    state: Path
    cache: Path
    ring: bool = False

    @property
    def name(self) -> str:
        """Begins every name in the kernel and in /run; the fixed part keeps LAB_ID away from names of the system."""
        return "sparkpair-lab" if self.ident == DEFAULT_ID else f"sparkpair-lab-{self.ident}"

    @property
    def marker(self) -> Path:
        """The file by which the lab knows its own state folder; nothing is deleted in a folder without it."""
        return self.state / ".sparkpair-lab"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(index) for index in range(self.count))

    @property
    def run_folder(self) -> Path:
        """Runtime state that dies with the machine: who owns the lab, and SSH control sockets."""
        return Path("/run") / self.name

    @property
    def lab_namespace(self) -> str:
        """Name of the network namespace on the lab's own side of the management network."""
        return f"{self.name}-lab"

    @property
    def park_namespace(self) -> str:
        """Name of the namespace that holds the cable ends of nodes that are off."""
        return f"{self.name}-park"

    def namespace(self, node: Node) -> str:
        return f"{self.name}-{node.name}"

    def owns(self, namespace: str) -> bool:
        """Whether this lab, and no other, gives that name to a namespace (and to the mounts of a node)."""
        return re.fullmatch(re.escape(self.name) + "-(lab|park|spark-[abc])", namespace) is not None

    def node_folder(self, node: Node) -> Path:
        return self.state / node.name

    def node(self, name: str) -> Node:
        """The node called `name`; raises LabError with the names that exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise LabError(f"there is no node '{name}'; the nodes are: {', '.join(node.name for node in self.nodes)}")


def environment(settings: Settings) -> dict[str, str]:
    """The environment variables from which `read_settings` makes `settings`."""
    return {
        "LAB_ID": settings.ident,
        "LAB_NODES": str(settings.count),
        "LAB_DIR": str(settings.state),
        "LAB_CACHE_DIR": str(settings.cache),
        "LAB_RING": "1" if settings.ring else "",
    }


def read_settings(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> Settings:
    """Settings from LAB_ID, LAB_NODES, LAB_DIR and LAB_CACHE_DIR; raises LabError for a value that cannot be."""
    ident = environment.get("LAB_ID") or DEFAULT_ID
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", ident):
        raise LabError(f"LAB_ID is '{ident}'; it must be 1 to 16 lower-case letters and digits, a letter first")
    count = environment.get("LAB_NODES") or "2"
    if count not in ("2", "3"):
        raise LabError(f"LAB_NODES is '{count}'; the lab has 2 or 3 nodes")
    default_state = root / ".lab" if ident == DEFAULT_ID else root / ".lab" / ident
    state = Path(environment.get("LAB_DIR") or default_state).absolute()
    cache = Path(environment.get("LAB_CACHE_DIR") or root / ".cache").absolute()
    for folder in (state, cache):
        if bad := set(str(folder)) & set(":,\"'\\%\n"):
            raise LabError(f"the lab cannot live in {folder}: mount options do not take {' '.join(sorted(bad))}")
    ring = bool(environment.get("LAB_RING"))
    if ring and count != "3":
        raise LabError(f"LAB_RING needs LAB_NODES=3, not {count}")
    return Settings(ident=ident, count=int(count), state=state, cache=cache, ring=ring)
