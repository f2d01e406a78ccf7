#!/usr/bin/env python3
"""Entry point of `python3 lab/lab.py VERB`, from any directory; the same as `python3 -m lab` in the checkout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("lab", run_name="__main__", alter_sys=False)
