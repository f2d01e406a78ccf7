"""Make `library/` and `module_utils/` importable as Ansible itself sees them."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "library"))
sys.path.insert(0, str(ROOT))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
