"""Known-bad states are data: entries that name facts of a node and what makes them bad, never code.

An entry of `known_bad.yml` (or of an inventory) looks so; all conditions under `when` must hold:

    id: kho-takes-the-cma
    summary: a kernel that keeps the contiguous memory for itself
    when:
      kernel: {version: ">=7.0.0-1019 <7.0.0-1020"}
      meminfo.CmaTotal: {equals: 0}
    severity: fatal
    blocks: [preflight, accept]
    remedy: boot with kho=off
    source: NVIDIA advisory 383254

A condition is a dotted path into the facts (`FACTS`) with one operator (`OPERATORS`). Where the path meets a list, one
element is enough. A fact that nobody could read meets no condition: absence of evidence is not a known-bad state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FACTS: Mapping[str, str] = {
    "os": "ID and VERSION_ID of os-release",
    "release": "DGX OS update that runs (the last line of dgx-release wins)",
    "kernel": "uname -r",
    "cmdline": "/proc/cmdline",
    "meminfo": "fields of /proc/meminfo in bytes",
    "dmi": "product_name, board_vendor, bios_version, bios_date",
    "driver": "module, package, running (versions) and error (what nvidia-smi said instead)",
    "gpu": "name, power_w, utilization (percent), clock_mhz",
    "cuda": "version of the toolkit's package",
    "nccl": "version (upstream), package, path, sha256; wheel_version, wheel_path, wheel_sha256 of vLLM's environment",
    "nics": "list: hca, netdev, firmware, width (lanes), speed (Mb/s), mtu, carrier (1 or 0), rail_mtu (with a link)",
    "rank_unit": "memlock (bytes; 2**63 for infinity), active (1 or 0)",
    "rank_env": "variables of /etc/sparkpair/rank.env and of /run/sparkpair-rank/fabric.env",
    "engine": "options of /etc/sparkpair/engine.yaml, one line each",
    "files": "texts of a few configuration files by path",
    "leftovers": "processes (VLLM:: outside the service) and shared memory (segments, bytes)",
    "listeners": "TCP listeners, address:port",
    "api_key": "1 when the API asks for a key, else 0",
    "reboot_required": "packages that wait for a reboot",
    "shared_keys": "private keys that a setup script copied to every node",
    "snap_docker": "1 when Docker came as a snap, else 0",
    "earlyoom": "active (1 or 0) and arguments",
    "system_log": "lines of this boot's kernel and earlyoom",
    "rank_log": "lines of the rank's current run",
}
"""First part of every path, and what it holds."""

LOGS = ("system_log", "rank_log")

OPERATORS: Mapping[str, str] = {
    "equals": "the value, compared as text",
    "below": "a number that is smaller",
    "above": "a number that is larger",
    "version": 'constraints that all hold, as ">=7.0.0-1019 <7.0.1"',
    "matches": "a regular expression that is found; with count: in at least so many values; with after: only behind "
    "the last value that fits that expression",
    "lacks": "a regular expression that is found in no value",
    "unset": "true: the fact was read and has no such part, or an empty one",
}

SEVERITIES = ("fatal", "warning")
STAGES = ("preflight", "gpu", "accept")
"""Stages that judge facts; a fatal entry names those that it stops."""

KEYS = ("id", "summary", "when", "severity", "blocks", "remedy", "source")
MODIFIERS = ("count", "after")

_CONSTRAINT = re.compile(r"(>=|<=|==|<|>)\s*(\S+)")
_COMPARE = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


class KnownBadError(ValueError):
    """An entry that says nothing definite; the text names the entry, the key and what is expected."""


@dataclass(frozen=True)
class Entry:
    """One known-bad state, checked for shape. `when`: path to its one condition."""

    id: str
    summary: str
    when: Mapping[str, Mapping[str, Any]]
    severity: str
    blocks: tuple[str, ...]
    remedy: str
    source: str


@dataclass(frozen=True)
class Hit:
    """An entry that a node meets; `evidence` names the facts that meet it."""

    entry: Entry
    evidence: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `exit_json`."""
        entry = self.entry
        return {
            "id": entry.id,
            "summary": entry.summary,
            "severity": entry.severity,
            "blocks": list(entry.blocks),
            "remedy": entry.remedy,
            "source": entry.source,
            "evidence": self.evidence,
        }


def version(text: str) -> tuple[int, ...]:
    """The numbers at the front of a version, if any: 7.0.0-1019-nvidia is (7, 0, 0, 1019)."""
    numbers = []
    for part in re.split(r"[.\-+~_]", str(text).strip()):
        if not re.fullmatch(r"[0-9]{1,9}", part):
            break
        numbers.append(int(part))
    return tuple(numbers)


def in_range(text: str, constraints: str) -> bool:
    """Whether a version meets every constraint; a text without a version meets none."""
    have = version(text)
    if not have:
        return False
    for sign, bound in _CONSTRAINT.findall(constraints):
        limit = version(bound)
        width = max(len(have), len(limit))
        if not _COMPARE[sign](have + (0,) * (width - len(have)), limit + (0,) * (width - len(limit))):
            return False
    return True


def values_at(facts: Any, path: str) -> list[Any] | None:
    """Everything that `path` reaches, lists opened; None when its first part was not read."""
    first, *rest = path.split(".")
    if not isinstance(facts, Mapping) or facts.get(first) is None:
        return None
    found: list[Any] = [facts[first]]
    keys = list(rest)
    # A key may hold dots itself, as names of files do.
    while keys or any(isinstance(value, list | tuple) for value in found):
        opened = [item for value in found for item in (value if isinstance(value, list | tuple) else [value])]
        if not keys:
            return [value for value in opened if value is not None]
        whole = ".".join(keys)
        if any(isinstance(value, Mapping) and whole in value for value in opened):
            found, keys = [value[whole] for value in opened if isinstance(value, Mapping) and whole in value], []
        else:
            found = [value[keys[0]] for value in opened if isinstance(value, Mapping) and keys[0] in value]
            keys = keys[1:]
    return [value for value in found if value is not None]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _behind(values: Sequence[str], expression: str) -> Sequence[str]:
    places = [place for place, value in enumerate(values) if re.search(expression, value)]
    return values[places[-1] + 1 :] if places else []


def meets(facts: Mapping[str, Any], path: str, test: Mapping[str, Any]) -> str | None:
    """What of the facts meets one condition, as evidence; None when nothing does."""
    values = values_at(facts, path)
    if values is None:
        return None
    if "unset" in test:
        return f"{path} is not set" if not [value for value in values if str(value) != ""] else None
    texts = [str(value) for value in values]
    if "lacks" in test:
        return None if any(re.search(test["lacks"], text) for text in texts) else f"{path} lacks {test['lacks']}"
    if "matches" in test:
        if "after" in test:
            texts = list(_behind(texts, test["after"]))
        found = [text for text in texts if re.search(test["matches"], text)]
        return _shown(path, found[-1], len(found)) if len(found) >= int(test.get("count", 1)) else None
    for value, text in zip(values, texts, strict=True):
        number = _number(value)
        if (
            ("equals" in test and text == str(test["equals"]))
            or ("version" in test and in_range(text, test["version"]))
            or ("below" in test and number is not None and number < float(test["below"]))
            or ("above" in test and number is not None and number > float(test["above"]))
        ):
            return _shown(path, text, 1)
    return None


def _shown(path: str, text: str, count: int) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= 160 else line[:159] + "…"
    times = f" ({count} times)" if count > 1 else ""
    return f"{path}: {line}{times}"


def parse(entries: Iterable[Any], accepted: Sequence[str] = ()) -> list[Entry]:
    """Entries checked for shape; a later one replaces an earlier one of the same id, `accepted` ids are left out.

    Raises KnownBadError for the first entry that is not whole, and for an accepted id that no entry has.
    """
    known: dict[str, Entry] = {}
    for place, raw in enumerate(entries):
        entry = _parse_entry(raw, place)
        known[entry.id] = entry
    for name in accepted:
        if name not in known:
            raise KnownBadError(f"found the accepted id {name!r}, expected one that an entry has: {', '.join(known)}")
    return [entry for entry in known.values() if entry.id not in accepted]


def _parse_entry(raw: Any, place: int) -> Entry:
    if not isinstance(raw, Mapping):
        raise KnownBadError(f"entry {place + 1}: found {type(raw).__name__}, expected the keys {', '.join(KEYS)}")
    name = f"entry {raw.get('id', place + 1)}"
    if wrong := sorted(map(str, set(raw) ^ set(KEYS))):
        raise KnownBadError(f"{name}: found missing or unknown keys ({', '.join(wrong)}), expected {', '.join(KEYS)}")
    for key in ("id", "summary", "severity", "remedy", "source"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            raise KnownBadError(f"{name}: found {key}={raw[key]!r}, expected text")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", raw["id"]):
        raise KnownBadError(f"{name}: found an id that is not lower-case words joined by dashes")
    if raw["severity"] not in SEVERITIES:
        raise KnownBadError(f"{name}: found severity {raw['severity']!r}, expected {' or '.join(SEVERITIES)}")
    blocks = raw["blocks"]
    if not isinstance(blocks, list) or any(stage not in STAGES for stage in blocks):
        raise KnownBadError(f"{name}: found blocks {blocks!r}, expected a list of {', '.join(STAGES)}")
    if (raw["severity"] == "fatal") != bool(blocks):
        raise KnownBadError(f"{name}: found severity {raw['severity']} with blocks {blocks}, expected stages for fatal")
    if not isinstance(raw["when"], Mapping) or not raw["when"]:
        raise KnownBadError(f"{name}: found no condition under when, expected at least one")
    for path, test in raw["when"].items():
        _check_condition(f"{name}: {path}", str(path), test)
    return Entry(
        raw["id"], raw["summary"], dict(raw["when"]), raw["severity"], tuple(blocks), raw["remedy"], raw["source"]
    )


def _check_condition(name: str, path: str, test: Any) -> None:
    if path.split(".")[0] not in FACTS:
        raise KnownBadError(f"{name}: found an unknown fact, expected one of {', '.join(FACTS)}")
    if not isinstance(test, Mapping) or len(set(test) & set(OPERATORS)) != 1:
        raise KnownBadError(f"{name}: found {test!r}, expected one operator of {', '.join(OPERATORS)}")
    allowed = {*OPERATORS, *(MODIFIERS if "matches" in test else ())}
    if wrong := sorted(map(str, set(test) - allowed)):
        raise KnownBadError(f"{name}: found {', '.join(wrong)}, expected count and after beside matches only")
    for key in ("matches", "lacks", "after"):
        if key in test:
            try:
                re.compile(test[key])
            except (re.error, TypeError) as error:
                raise KnownBadError(
                    f"{name}: found {key}={test[key]!r}, expected a regular expression ({error})"
                ) from error
    for key in ("below", "above", "count"):
        if key in test and (_number(test[key]) is None or isinstance(test[key], bool)):
            raise KnownBadError(f"{name}: found {key}={test[key]!r}, expected a number")
    if "version" in test:
        text = str(test["version"])
        found = _CONSTRAINT.findall(text)
        if not found or _CONSTRAINT.sub("", text).strip() or any(not version(bound) for _, bound in found):
            raise KnownBadError(f'{name}: found version={text!r}, expected constraints as ">=2.28.9 <2.30"')
    if "unset" in test and test["unset"] is not True:
        raise KnownBadError(f"{name}: found unset={test['unset']!r}, expected true")


def log_patterns(entries: Iterable[Entry]) -> dict[str, list[str]]:
    """Expressions that lines of each log must meet to matter; other lines need not be kept."""
    found: dict[str, list[str]] = {log: [] for log in LOGS}
    for entry in entries:
        for path, test in entry.when.items():
            if path in found:
                found[path] += [str(test[key]) for key in ("matches", "lacks", "after") if key in test]
    return found


def judge(entries: Iterable[Entry], facts: Mapping[str, Any]) -> list[Hit]:
    """The entries that the facts of one node meet, in the order of the entries."""
    hits = []
    for entry in entries:
        evidence = []
        for path, test in entry.when.items():
            found = meets(facts, path, test)
            if found is None:
                break
            evidence.append(found)
        else:
            hits.append(Hit(entry, "; ".join(evidence)))
    return hits


def sentence(name: str, hit: Mapping[str, Any]) -> str:
    """One hit (as `Hit.as_dict`) of node `name` in words."""
    return (
        f"{name}: found {hit['summary']} ({hit['evidence']}), expected nothing that is known to fail: {hit['remedy']} "
        f"(known-bad {hit['id']}; {hit['source']})"
    )


def split(name: str, hits: Iterable[Mapping[str, Any]], stage: str) -> tuple[list[str], list[str]]:
    """Sentences of one node's hits: those that stop `stage`, and those that warn."""
    faults: list[str] = []
    warnings: list[str] = []
    for hit in hits:
        (faults if stage in hit["blocks"] else warnings).append(sentence(name, hit))
    return faults, warnings
