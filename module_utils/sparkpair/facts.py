"""Facts of a node on which parity and known-bad states stand: driver, CUDA, NCCL, firmware, memory, logs, leftovers.

Everything is read below `root` or asked from a command through `run`, so a test hands in a folder and a table of
answers. What cannot be read is None, which matches nothing, or absent; nothing here raises for a strange node.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.fabric import attribute, entries, number
from ansible.module_utils.sparkpair.node import parse_keys, parse_meminfo, read_text

Run = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a command; returns its exit status, output and error output."""

INFINITY = 1 << 63
"""What LimitMEMLOCK=infinity counts as, in bytes."""

LOG_LINES = 20_000
"""Lines of a log, from its end, that are looked at; of those that fit a pattern KEPT_LINES are kept."""
KEPT_LINES = 400

FILES = ("/etc/nccl.conf", "/etc/sparkpair/rank.env", "/etc/sparkpair/fabric.nft")
"""Configuration files whose text is a fact."""

RESOLVED = "run/sparkpair-rank/fabric.env"
"""Variables that resolve.py chose for the generation that runs."""

GPU_FIELDS = ("name", "driver_version", "power.draw", "utilization.gpu", "clocks.sm")
# A driver that is stuck in the kernel lets nvidia-smi wait for ever.
GPU_QUERY = ("timeout", "20", "nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")

PACKAGES = ("nvidia-driver-*", "libnvidia-compute-*", "cuda-toolkit-1*", "libnccl2", "libnccl-dev")
PACKAGE_QUERY = ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\n", *PACKAGES)

# Names that vLLM's processes give themselves, and what NCCL, torch and Python leave in /dev/shm.
ENGINE = re.compile(r"VLLM::")
SEGMENT = re.compile(r"^(nccl-|psm_|sem\.mp-|torch_|vllm|cuda\.shm)")
API_KEYS = ("api-keys", "generated-api-keys")
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


class FactsError(ValueError):
    """Output of a tool that is not what it prints; the text shows it."""


def tolerant(run_command: Callable[..., tuple[int, str, str]]) -> Run:
    """AnsibleModule.run_command that answers 127 for a command that is not on the node, as a shell does."""

    def run(command: Sequence[str]) -> tuple[int, str, str]:
        try:
            return run_command(list(command), handle_exceptions=False)
        except OSError as error:
            return 127, "", str(error)

    return run


def parse_module_version(text: str) -> str:
    """Version of the loaded kernel module from /proc/driver/nvidia/version; empty when no module is loaded."""
    found = re.search(r"NVRM version:.*?\s(\d{3}\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""


def parse_packages(text: str) -> dict[str, str]:
    """Installed packages of PACKAGE_QUERY: name to version. Known but removed ones are left out."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3 and re.fullmatch(r"[a-z]i\S*", row[2])}


def parse_gpu(text: str) -> dict[str, Any]:
    """The first GPU of GPU_QUERY: name, driver, power_w, utilization (percent), clock_mhz; numbers are None for [N/A].

    Raises FactsError for anything else, such as the sentence that nvidia-smi prints without a driver.
    """
    line = (text.strip().splitlines() or [""])[0]
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(GPU_FIELDS) or not re.fullmatch(r"[0-9]+(\.[0-9]+){1,2}", cells[1]):
        raise FactsError(line or "nothing")
    numbers = [float(cell) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cell) else None for cell in cells[2:]]
    return dict(zip(("name", "driver", "power_w", "utilization", "clock_mhz"), [*cells[:2], *numbers], strict=True))


def parse_listeners(text: str) -> list[str]:
    """Listening sockets of /proc/net/tcp or tcp6 as "0.0.0.0:8000"; other addresses of IPv6 stay in hexadecimal."""
    found = []
    for line in text.splitlines():
        words = line.split()
        match = re.fullmatch(r"([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})", words[1]) if len(words) > 3 else None
        if match is None or words[3] != LISTEN:
            continue
        address = match.group(1)
        if len(address) == 8:
            shown = ".".join(str(int(address[at : at + 2], 16)) for at in (6, 4, 2, 0))
        else:
            shown = f"[{'::' if not address.strip('0') else address}]"
        found.append(f"{shown}:{int(match.group(2), 16)}")
    return sorted(set(found))


def parse_limit(text: str) -> int | None:
    """A limit as systemd prints it, in bytes; infinity is INFINITY, anything else None."""
    if text in ("infinity", str((1 << 64) - 1)):
        return INFINITY
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def driver_package(packages: Mapping[str, str]) -> str:
    """Version of the installed driver without the distribution's revision; empty when no driver package is there."""
    for prefix in ("nvidia-driver-", "libnvidia-compute-"):
        for name in sorted(packages):
            # Not nvidia-driver-assistant, which has a version of its own.
            if re.match(rf"{prefix}[0-9]", name):
                return packages[name].split(":")[-1].split("-")[0]
    return ""


def sha256(path: Path) -> str:
    """sha256 of a file in hexadecimal, empty when it cannot be read."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    except OSError:
        return ""
    return total.hexdigest()


def read_nccl(root: Path, packages: Mapping[str, str]) -> dict[str, str]:
    """The system's NCCL, and the one in vLLM's environment; empty texts where there is none."""
    system = sorted(root.glob("usr/lib/*-linux-gnu/libnccl.so.2"))
    wheels = sorted(root.glob("opt/sparkpair/current/lib/python3.*/site-packages"))
    site = wheels[0] if wheels else root / "opt/sparkpair/current/none"
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    versions = [path.name.split("-")[1] for path in sorted(site.glob("nvidia_nccl_cu1*.dist-info"))]
    package = packages.get("libnccl2", "")
    return {
        "package": package,
        "version": package.split("-")[0],
        "path": f"/{system[0].relative_to(root)}" if system else "",
        "sha256": sha256(system[0]) if system else "",
        "wheel_version": versions[0] if versions else "",
        "wheel_path": f"/{library.relative_to(root)}" if library.exists() else "",
        "wheel_sha256": sha256(library),
    }


def read_nics(sysfs: Path) -> list[dict[str, Any]]:
    """RDMA devices with their network interfaces, sorted by name; parts that cannot be read are left out."""
    found = []
    for hca in entries(sysfs / "class/infiniband"):
        for netdev in entries(hca / "device/net") or [Path()]:
            net = sysfs / "class/net" / netdev.name
            carrier = number(net / "carrier") or 0
            nic = {
                "hca": hca.name,
                "netdev": netdev.name,
                "firmware": attribute(hca / "fw_ver"),
                "width": number(hca / "device/current_link_width"),
                "speed": number(net / "speed"),
                "mtu": number(net / "mtu"),
                "carrier": carrier,
                "rail_mtu": number(net / "mtu") if carrier else None,
            }
            found.append({key: value for key, value in nic.items() if value is not None})
    return found


def read_driver(run: Run, root: Path, packages: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Versions of the driver (module, package, running; error when nvidia-smi has none), and what the GPU does."""
    driver = {
        "module": parse_module_version(read_text(root / "proc/driver/nvidia/version")),
        "package": driver_package(packages),
        "running": "",
        "error": "",
    }
    _, out, err = run(GPU_QUERY)
    try:
        gpu = parse_gpu(out)
    except FactsError:
        message = (out.strip() or err.strip() or "no answer within 20 s").splitlines()[0]
        return {**driver, "error": message}, {}
    driver["running"] = gpu.pop("driver")
    return driver, gpu


def read_leftovers(root: Path, service: str = "sparkpair-rank.service") -> dict[str, Any]:
    """Engine processes outside `service`'s cgroup, and shared memory that a dead one may have left (bytes)."""
    processes = []
    for folder in entries(root / "proc"):
        if not folder.name.isdigit():
            continue
        name = read_text(folder / "cmdline").replace("\0", " ").strip() or read_text(folder / "comm").strip()
        if ENGINE.search(name) and service not in read_text(folder / "cgroup"):
            processes.append(f"{folder.name} {name[:60]}")
    segments = [path for path in entries(root / "dev/shm") if SEGMENT.match(path.name)]
    sizes = []
    for path in segments:
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue  # it went away meanwhile
    return {"processes": processes, "segments": len(sizes), "bytes": sum(sizes)}


def read_log(run: Run, query: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The last lines of a journal that fit a pattern, oldest first."""
    if not patterns:
        return []
    _, out, _ = run(["journalctl", "-q", "--no-pager", "-o", "short", "-n", str(LOG_LINES), *query])
    wanted = [re.compile(pattern) for pattern in patterns]
    kept = [line for line in out.splitlines() if any(pattern.search(line) for pattern in wanted)]
    return kept[-KEPT_LINES:]


def read_rank_unit(run: Run) -> tuple[dict[str, int], str]:
    """Facts of the rank's unit (empty when it is not installed), and the id of its current run."""
    _, out, _ = run(["systemctl", "show", "sparkpair-rank", "-p", "LoadState,ActiveState,LimitMEMLOCK,InvocationID"])
    shown = parse_keys(out)
    if shown.get("LoadState") != "loaded":
        return {}, ""
    memlock = parse_limit(shown.get("LimitMEMLOCK", ""))
    facts = {"active": int(shown.get("ActiveState") == "active")}
    return facts | ({} if memlock is None else {"memlock": memlock}), shown.get("InvocationID", "")


def read_earlyoom(run: Run, root: Path) -> dict[str, Any]:
    """Whether earlyoom runs, and its arguments from /etc/default/earlyoom."""
    _, out, _ = run(["systemctl", "is-active", "earlyoom.service"])
    arguments = parse_keys(read_text(root / "etc/default/earlyoom")).get("EARLYOOM_ARGS", "")
    return {"active": int(out.strip() == "active"), "arguments": arguments}


def read_shared_keys(root: Path) -> list[str]:
    """Private keys of the vendor's discovery script, which copies one key to every node."""
    found: Iterable[Path] = [*root.glob("home/*/.ssh/id_ed25519_shared"), *root.glob("root/.ssh/id_ed25519_shared")]
    return sorted(f"/{path.relative_to(root)}" for path in found)


def read_facts(
    run: Run, patterns: Mapping[str, Sequence[str]], root: Path = Path("/"), sysfs: Path = Path("/sys")
) -> dict[str, Any]:
    """Every fact of `known_bad.FACTS` that `node.read_node` does not give. `patterns`: log name to expressions."""
    packages = parse_packages(run(PACKAGE_QUERY)[1])
    driver, gpu = read_driver(run, root, packages)
    unit, invocation = read_rank_unit(run)
    toolkits = [packages[name] for name in sorted(packages) if name.startswith("cuda-toolkit-1")]
    texts = {name: read_text(root / name.lstrip("/")) for name in FILES}
    # Without translation of line ends: carriage returns are a known-bad state.
    raw = root / "etc/sparkpair/rank.env"
    if raw.exists():
        texts["/etc/sparkpair/rank.env"] = raw.read_bytes().decode(errors="replace")
    rank_log = [f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else ["-u", "sparkpair-rank", "-b"]
    return {
        "cmdline": read_text(root / "proc/cmdline").strip(),
        "meminfo": parse_meminfo(read_text(root / "proc/meminfo")),
        "dmi": {
            name: attribute(Path("/sys/class/dmi/id" if root == Path("/") else root / "sys/class/dmi/id") / name) or ""
            for name in ("product_name", "board_vendor", "bios_version", "bios_date")
        },
        "driver": driver,
        "gpu": {name: value for name, value in gpu.items() if value is not None},
        "cuda": {"version": toolkits[-1] if toolkits else ""},
        "nccl": read_nccl(root, packages),
        "nics": read_nics(sysfs),
        "rank_unit": unit,
        "rank_env": parse_keys(texts["/etc/sparkpair/rank.env"] + read_text(root / RESOLVED)),
        "engine": [line for line in read_text(root / "etc/sparkpair/engine.yaml").splitlines() if ": " in line],
        "files": texts,
        "accepted": read_text(root / "var/lib/sparkpair/accepted").strip(),
        "leftovers": read_leftovers(root),
        "listeners": parse_listeners(read_text(root / "proc/net/tcp") + read_text(root / "proc/net/tcp6")),
        "api_key": int(any(read_text(root / "etc/sparkpair" / name).strip() for name in API_KEYS)),
        "reboot_required": read_text(root / "var/run/reboot-required.pkgs").split(),
        "shared_keys": read_shared_keys(root),
        "snap_docker": int((root / "snap/docker/current").exists()),
        "earlyoom": read_earlyoom(run, root),
        "system_log": read_log(
            run, ["-b", "_TRANSPORT=kernel", "+", "SYSLOG_IDENTIFIER=earlyoom"], patterns["system_log"]
        ),
        "rank_log": read_log(run, rank_log, patterns["rank_log"]) if unit else [],
    }
