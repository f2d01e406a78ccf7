"""Have root's helper drop the page cache, wait until it did, then become the command: page_cache.py SOCKET COMMAND...

The page cache counts as used memory when vLLM asks for what is free. It is dropped before each generation on each
node, in the process that becomes vLLM: the agent goes on meanwhile, and can end it. Without the socket (the gpu
stage's gpu_drop_caches is false) and when the helper is late, vLLM starts as it is.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

WITHIN_S = 30.0
"""Longest wait: writing dirty pages of a fresh copy of weights takes seconds."""


def drop(path: Path) -> str:
    """Wait until the helper behind the socket has finished; returns what happened, in words (empty: no helper)."""
    if not path.exists():
        return ""
    try:
        with socket.socket(socket.AF_UNIX) as helper:
            helper.settimeout(WITHIN_S)
            helper.connect(str(path))
            helper.recv(1)
    except OSError as error:
        return f"the page cache was not dropped: {error}"
    return "the page cache was dropped"


def main(arguments: list[str]) -> None:
    """Entry point; does not return."""
    if said := drop(Path(arguments[0])):
        print(f"sparkpair: {said}", flush=True)
    os.execv(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
