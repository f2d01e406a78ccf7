"""Make `library/`, `module_utils/` and `agent/` importable as Ansible and the nodes see them."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "library"))
sys.path.insert(0, str(ROOT / "agent"))
sys.path.insert(0, str(ROOT))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
