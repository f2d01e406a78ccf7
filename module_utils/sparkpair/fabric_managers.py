"""Who manages an interface: netplan files, NetworkManager profiles, networkd. Pure but for reading files.

The standard library has no YAML reader, so a netplan file counts as speaking of an interface when a line that is
no comment has its name as a word, its MAC, or a `name:` pattern that fits it. That errs on the side of refusing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ansible.module_utils.sparkpair.fabric_guard import Run, inside

NETPLAN_FOLDERS = ("etc/netplan", "lib/netplan", "run/netplan")
"""Where netplan reads from."""

NM_NETPLAN = re.compile(r"^90-NM-([0-9a-f-]{36})(?:-.*)?\.yaml$")
"""Ubuntu's NetworkManager keeps its own profiles as netplan files of this name."""

FIELDS = ("UUID", "TYPE", "DEVICE", "FILENAME", "NAME")

_WORD = r"(?<![\w.-]){}(?![\w.-])"


@dataclass(frozen=True)
class Profile:
    """One NetworkManager profile. `device` is where it is active, `bound` the interface name or MAC it names."""

    uuid: str
    name: str
    device: str
    file: str
    bound: str = ""


def mentions(text: str, netdev: str, mac: str | None = None) -> bool:
    """Whether a netplan file speaks of `netdev`."""
    lines = [line.split(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#")]
    bare = "\n".join(lines)
    if re.search(_WORD.format(re.escape(netdev)), bare):
        return True
    if mac and mac.lower() in bare.lower():
        return True
    patterns = re.findall(r"(?<![\w-])name:\s*[\"']?([^\s\"'#,}]+)", bare)
    return any(fnmatchcase(netdev, pattern) for pattern in patterns if set(pattern) & set("*?["))


def netplan_files(root: Path, netdevs: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Netplan files that speak of each interface: netdev -> paths. `netdevs` maps a name to its MAC."""
    found: dict[str, list[str]] = {netdev: [] for netdev in netdevs}
    for folder in NETPLAN_FOLDERS:
        for path in sorted(inside(root, folder).glob("*.yaml")):
            text = path.read_text(encoding="utf-8", errors="replace")
            for netdev, mac in netdevs.items():
                if mentions(text, netdev, mac):
                    found[netdev].append(f"/{folder}/{path.name}")
    return found


def split_terse(line: str) -> list[str]:
    """One line of `nmcli -t`: fields by colon; a backslash protects a colon that belongs to a field."""
    return [re.sub(r"\\(.)", r"\1", field) for field in re.split(r"(?<!\\):", line)]


def parse_profiles(output: str, root: Path = Path("/")) -> list[Profile]:
    """Ethernet profiles in the output of `nmcli -t -f UUID,TYPE,DEVICE,FILENAME,NAME connection show`."""
    profiles = []
    for line in output.splitlines():
        fields = split_terse(line)
        if len(fields) != len(FIELDS) or fields[1] != "802-3-ethernet":
            continue
        uuid, _, device, file, name = fields
        keyfile = inside(root, file) if file else None
        text = keyfile.read_text(encoding="utf-8", errors="replace") if keyfile and keyfile.is_file() else ""
        bound = re.search(r"^(?:interface-name|mac-address)\s*=\s*(\S+)", text, re.MULTILINE)
        profiles.append(Profile(uuid, name, device, file, bound.group(1) if bound else ""))
    return profiles


def read_profiles(run: Run, root: Path = Path("/")) -> list[Profile]:
    """NetworkManager's profiles; none where it is not there or does not run."""
    if not inside(root, "run/NetworkManager").is_dir():
        return []
    try:
        status, out, _ = run(["nmcli", "-t", "-f", ",".join(FIELDS), "connection", "show"])
    except OSError:
        return []
    return parse_profiles(out, root) if status == 0 else []


def on_rail(profile: Profile, netdev: str, mac: str | None) -> bool:
    """Whether a profile is active on an interface, or bound to it."""
    names = {netdev.lower(), (mac or "").lower()} - {""}
    return profile.device == netdev or profile.bound.lower() in names


def from_netplan(profile: Profile, netdevs: Iterable[str]) -> bool:
    """Whether netplan made the profile from a plan that names the interface: ours, or a file that is refused."""
    return profile.file.startswith("/run/") and any(profile.file.endswith(f"netplan-{n}.nmconnection") for n in netdevs)


def profile_file(profile: Profile, root: Path = Path("/")) -> str:
    """The file that keeps a profile over a reboot: netplan's on Ubuntu, else NetworkManager's; "" for neither."""
    for path in sorted(inside(root, "etc/netplan").glob("90-NM-*.yaml")):
        match = NM_NETPLAN.match(path.name)
        if match and match.group(1) == profile.uuid:
            return f"/etc/netplan/{path.name}"
    return profile.file if profile.file.startswith("/etc/NetworkManager/") else ""


def leftovers(profiles: Sequence[Profile], netdevs: Mapping[str, str | None]) -> list[Profile]:
    """Profiles on a rail that netplan did not make from a plan of the rails."""
    return [
        profile
        for profile in profiles
        if not from_netplan(profile, netdevs) and any(on_rail(profile, n, mac) for n, mac in netdevs.items())
    ]


def networkd_files(root: Path, netdev: str) -> list[str]:
    """The .network files, netplan's own left out, whose `Name=` fits an interface."""
    found = []
    for folder in ("etc/systemd/network", "run/systemd/network"):
        for path in sorted(inside(root, folder).glob("*.network")):
            text = path.read_text(encoding="utf-8", errors="replace")
            patterns = " ".join(re.findall(r"^Name=(.+)$", text, re.MULTILINE)).split()
            if "netplan" not in path.name and any(fnmatchcase(netdev, pattern) for pattern in patterns):
                found.append(f"/{folder}/{path.name}")
    return found


def managers(root: Path, netdevs: Mapping[str, str | None], run: Run) -> dict[str, dict[str, list[str]]]:
    """Who manages each interface: netdev -> {netplan: files, NetworkManager: profile names, networkd: files}."""
    files, profiles = netplan_files(root, netdevs), read_profiles(run, root)
    return {
        netdev: {
            "netplan": files[netdev],
            "NetworkManager": [profile.name for profile in profiles if on_rail(profile, netdev, mac)],
            "networkd": networkd_files(root, netdev),
        }
        for netdev, mac in netdevs.items()
    }
