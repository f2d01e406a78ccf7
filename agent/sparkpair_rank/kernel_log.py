"""Known-bad states that the kernel logs: restarts do not mend them, so nothing is restarted while one is there."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

EVERY_S = 60.0
JOURNAL = ("journalctl", "-q", "-k", "-b", "--no-pager", "-o", "cat", "-n", "50")


class KernelLog:
    """Reads what the kernel logged in this boot, each line once."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """`entries` as in known_bad.yml; those with no condition but `system_log: {matches: …}` count."""
        self.known = [
            (re.compile(entry["when"]["system_log"]["matches"]), f"{entry['summary']}): {entry['remedy']}")
            for entry in entries
            if list(entry["when"]) == ["system_log"] and list(entry["when"]["system_log"]) == ["matches"]
        ]
        self.asked_at = -1e9
        self.since = 0
        self.found = ""

    def hold(self, now: float) -> str:
        """Why nothing may be restarted in this boot, empty when there is nothing. `now`: monotonic seconds.

        The journal is asked at most once in EVERY_S; set `asked_at` to a past time to ask at once.
        """
        if self.known and not self.found and now - self.asked_at >= EVERY_S:
            self.asked_at, until = now, int(time.time())
            pattern = "|".join(f"(?:{expression.pattern})" for expression, _ in self.known)
            command = [*JOURNAL, f"--since=@{self.since}", f"--grep={pattern}"]
            with suppress(OSError, subprocess.TimeoutExpired):
                lines = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout
                self.since = until
                self.found = self.judge(lines.splitlines())
        return self.found

    def judge(self, lines: Iterable[str]) -> str:
        """What the first line that fits an entry says, with what mends it; empty when none fits."""
        for line in lines:
            for expression, text in self.known:
                if expression.search(line):
                    return f"the kernel logged '{line.strip()[:160]}' ({text}"
        return ""
