"""What a node's fabric shall be, and everything that is not so: files, kernel settings, interfaces, firewall.

Reads only. Commands are run by a function that is handed in.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.fabric import FabricError
from ansible.module_utils.sparkpair.fabric_files import (
    ARP_SETTINGS,
    FIREWALL_UNIT,
    TABLE,
    find_block,
    firewall_text,
    hosts_block,
    sysctl_text,
    ufw_allowed,
    ufw_enabled,
    unit_text,
    with_block,
)
from ansible.module_utils.sparkpair.fabric_guard import Run, inside, read_live
from ansible.module_utils.sparkpair.fabric_managers import (
    NM_NETPLAN,
    Profile,
    leftovers,
    netplan_files,
    profile_file,
    read_profiles,
)

CONFIRM_SECONDS = 45
"""When an unconfirmed plan is taken back: applying and proving take 35 s at most, and 60 s are promised."""

HOSTS = Path("/etc/hosts")
SYSCTL_FILE = Path("/etc/sysctl.d/90-sparkpair-fabric.conf")
FIREWALL_FILE = Path("/etc/sparkpair/fabric.nft")
UNIT_FILE = Path("/etc/systemd/system") / FIREWALL_UNIT
ENABLED = Path("/etc/systemd/system/sysinit.target.wants") / FIREWALL_UNIT
UFW = (Path("/etc/ufw/ufw.conf"), Path("/etc/ufw/user.rules"))

Content = tuple[bytes, int] | None
"""What a file shall be: bytes and mode, or not there."""


@dataclass(frozen=True)
class Config:
    """What a node's rails shall be.

    `rails` as `fabric_info` returns them, `names` of all nodes in rank order (empty: /etc/hosts stays as it is),
    `ports` that only peers may reach; None leaves every firewall alone. `meeting` as `firewall_text` takes it. Files
    are absolute paths below `root`, which only tests change. `run` names the run that wants all this.
    """

    rails: Sequence[Mapping[str, Any]]
    mtu: int
    netplan_file: Path
    netplan_text: str
    journal: Path
    rank: int = 0
    names: Sequence[str] = ()
    ports: Sequence[int] | None = None
    meeting: Sequence[str] = ()
    confirm_seconds: int = CONFIRM_SECONDS
    root: Path = Path("/")
    run: str = ""

    @property
    def addresses(self) -> dict[str, str]:
        """Address with prefix length of each interface."""
        return {rail["netdev"]: rail["address"] for rail in self.rails}

    @property
    def macs(self) -> dict[str, str | None]:
        """Hardware address of each interface."""
        return {rail["netdev"]: rail.get("mac") for rail in self.rails}

    @property
    def origin(self) -> Path:
        """Where the state before us is kept."""
        return self.journal.with_name("origin.json")

    def inside(self, path: Path | str) -> Path:
        """`path` below `root`."""
        below: Path = inside(self.root, path)
        return below

    def firewall(self) -> str:
        """Our nftables file; empty when firewalls are left alone."""
        return "" if self.ports is None else firewall_text(self.rails, self.rank, self.ports, self.meeting)

    def files(self) -> dict[Path, Content]:
        """Every file that is ours; of /etc/hosts one block is."""
        hosts, block = read_text(self.inside(HOSTS)), hosts_block(self.rails, self.names)
        found: dict[Path, Content] = {
            self.netplan_file: (self.netplan_text.encode(), 0o600),
            SYSCTL_FILE: (sysctl_text(self.addresses).encode(), 0o644),
        }
        if block or find_block(hosts):
            found[HOSTS] = (
                with_block(hosts, block).encode("utf-8", "surrogateescape"),
                mode_of(self.inside(HOSTS)) or 0o644,
            )
        if text := self.firewall():
            found[FIREWALL_FILE] = (text.encode(), 0o644)
            found[UNIT_FILE] = (unit_text(str(FIREWALL_FILE)).encode(), 0o644)
        return found

    def settings(self) -> dict[Path, str]:
        """Kernel settings below /proc/sys: file -> value."""
        return {
            Path("/proc/sys/net/ipv4/conf") / netdev / name: value
            for netdev in self.addresses
            for name, value in ARP_SETTINGS.items()
        }


@dataclass
class Change:
    """One difference between what is and what shall be, for Ansible's diff."""

    title: str
    before: str
    after: str

    def diff(self) -> dict[str, str]:
        """As Ansible prints it."""
        return {
            "before_header": self.title,
            "after_header": self.title,
            "before": self.before,
            "after": self.after,
        }


@dataclass
class Wanted:
    """Everything that differs, and what it takes: files, ufw rules to add, NetworkManager profiles to take over."""

    changes: list[Change]
    files: dict[Path, Content]
    ufw: list[str]
    profiles: list[Profile]
    firewall: bool


def live_text(mtu: int | None, addresses: Iterable[str]) -> str:
    """An interface in one line for a diff."""
    return f"mtu {mtu}, addresses {' '.join(sorted(addresses)) or 'none'}\n"


def live_changes(config: Config, run: Run) -> list[Change]:
    """Rails whose MTU or address is not as planned, whatever the files say."""
    live, changes = read_live(run), []
    for netdev, address in config.addresses.items():
        mtu, addresses = live.get(netdev, (None, ()))
        if mtu != config.mtu or address not in addresses:
            after = live_text(config.mtu, {*addresses, address})
            changes.append(Change(f"interface {netdev}", live_text(mtu, addresses), after))
    return changes


def read_text(path: Path) -> str:
    """Text of a file, such that encoding it again gives the same bytes; empty when it is absent."""
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""


def shown(data: bytes) -> str:
    """Bytes as text for a diff."""
    return data.decode("utf-8", "replace")


def mode_of(path: Path) -> int | None:
    """Permission bits of a file; None when it is absent."""
    return path.stat().st_mode & 0o777 if path.is_file() else None


def file_changes(config: Config, files: Mapping[Path, Content]) -> list[Change]:
    """Files whose content or mode is not as planned."""
    changes = []
    for path, content in files.items():
        here = config.inside(path)
        before, found = (here.read_bytes() if here.is_file() else b""), mode_of(here)
        if content is None:
            if found is not None:
                changes.append(Change(f"{path} (removed)", shown(before), ""))
        elif (before, found) != content:
            title = str(path) if found in (None, content[1]) else f"{path} (mode {found:04o} -> {content[1]:04o})"
            changes.append(Change(title, shown(before), shown(content[0])))
    return changes


def setting_changes(config: Config) -> list[Change]:
    """Kernel settings that are not as planned."""
    changes = []
    for path, value in config.settings().items():
        before = read_text(config.inside(path)).strip()
        if before != value:
            changes.append(Change(str(path), f"{before}\n", f"{value}\n"))
    return changes


def firewall_changes(config: Config, run: Run) -> list[Change]:
    """How the table in the kernel differs from our file. An empty network namespace tells how the kernel prints it.

    Raises FabricError when nft is not there or refuses the file.
    """
    text = config.firewall()
    if not text:
        return []
    with tempfile.NamedTemporaryFile("w", prefix="sparkpair-", suffix=".nft") as file:
        file.write(text)
        file.flush()
        script = f'nft -f "$0" && nft -s list table inet {TABLE}'
        status, planned, err = run(["unshare", "--net", "sh", "-c", script, file.name])
    if status:
        raise FabricError(
            f"nft cannot load our table ({err.strip()}): install it with: apt-get install nftables; "
            "or set fabric_firewall to false"
        )
    _, live, _ = run(["nft", "-s", "list", "table", "inet", TABLE])
    changes = [] if live == planned else [Change(f"nftables table inet {TABLE}", live, planned)]
    if not config.inside(ENABLED).is_symlink():
        changes.append(Change(f"unit {FIREWALL_UNIT}", "disabled\n", "enabled\n"))
    return changes


def ufw_missing(config: Config) -> list[str]:
    """Rails that an active ufw does not let in. RDMA passes it, the TCP sides of NCCL, Gloo and vLLM do not."""
    conf, rules = (read_text(config.inside(path)) for path in UFW)
    if config.ports is None or not ufw_enabled(conf):
        return []
    return [netdev for netdev in config.addresses if not ufw_allowed(rules, netdev)]


def ufw_unmet(config: Config) -> list[str]:
    """Addresses off the rails where ranks meet, and that no rule of an active ufw names."""
    conf, rules = (read_text(config.inside(path)) for path in UFW)
    if config.ports is None or not ufw_enabled(conf):
        return []
    return [a for rank, a in enumerate(config.meeting) if rank != config.rank and f" {a} " not in rules]


def foreign_plans(config: Config) -> list[str]:
    """Netplan files that speak of a rail and are neither ours nor NetworkManager's own."""
    found = netplan_files(config.root, config.macs)
    paths = sorted({path for files in found.values() for path in files})
    return [path for path in paths if path != str(config.netplan_file) and not NM_NETPLAN.match(Path(path).name)]


def refuse_foreign_plans(config: Config) -> None:
    """Raise FabricError that names every netplan file of somebody else that speaks of a rail."""
    if foreign := foreign_plans(config):
        rails = " and ".join(config.addresses)
        raise FabricError(
            f"{' and '.join(foreign)} also configures {rails}, and two plans for one interface fight: "
            f"move it away (mv {foreign[0]} /root/) and run again; sparkpair never touches a plan that it did not write"
        )


def taken_over(config: Config, run: Run) -> tuple[list[Profile], dict[Path, Content]]:
    """NetworkManager profiles on the rails, and the files that keep them, which have to go.

    Raises FabricError for a profile that is active on a rail but bound to none: it may serve others too.
    """
    profiles = leftovers(read_profiles(run, config.root), config.macs)
    for profile in profiles:
        if profile_file(profile, config.root) and not profile.bound:
            raise FabricError(
                f"the NetworkManager profile {profile.name!r} is active on {profile.device}, but fits any interface: "
                f"bind it to the one that it is for: nmcli connection modify {profile.uuid} "
                "connection.interface-name enP7s7"
            )
    files: dict[Path, Content] = {
        Path(file): None for profile in profiles if (file := profile_file(profile, config.root))
    }
    for paths in netplan_files(config.root, config.macs).values():
        files |= {Path(path): None for path in paths if NM_NETPLAN.match(Path(path).name)}
    return profiles, files


def kept(config: Config, path: Path | str) -> dict[str, Any] | None:
    """A file as a journal keeps it; None when it is absent."""
    here = config.inside(path)
    if not here.is_file():
        return None
    return {"content": base64.b64encode(here.read_bytes()).decode(), "mode": mode_of(here)}


def read_json(path: Path) -> dict[str, Any]:
    """A journal or an origin; empty when it is absent."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def stale_files(config: Config, files: Iterable[Path]) -> dict[Path, Content]:
    """Files that we wrote with other settings and that are no longer ours: as they were before us."""
    origin = read_json(config.inside(config.origin))
    found: dict[Path, Content] = {}
    for path, digest in origin.get("ours", {}).items():
        if digest and Path(path) not in set(files):
            before = origin["files"].get(path)
            found[Path(path)] = (base64.b64decode(before["content"]), before["mode"]) if before else None
    return found


def examine(config: Config, run: Run) -> Wanted:
    """Everything that is not as planned. Raises FabricError when the plan must not be applied here."""
    refuse_foreign_plans(config)
    profiles, gone = taken_over(config, run)
    files = config.files()
    files = {**files, **gone, **stale_files(config, files)}
    ufw = ufw_missing(config)
    firewall = firewall_changes(config, run)
    changes = [
        *file_changes(config, files),
        *setting_changes(config),
        *live_changes(config, run),
        *firewall,
        *(Change(f"ufw on {netdev}", "", f"allow in on {netdev}\n") for netdev in ufw),
        *(Change(f"NetworkManager profile {p.name}", f"active on {p.device}\n", "") for p in profiles if p.device),
    ]
    ours = {str(FIREWALL_FILE), str(UNIT_FILE)} if config.firewall() else set()
    reload = bool(firewall) or any(change.title.split(" ")[0] in ours for change in changes)
    return Wanted(changes, files, ufw, profiles, reload)
