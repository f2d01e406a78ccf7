"""These tests download with the real huggingface_hub of an environment, so they are apart from the unit tests."""

from __future__ import annotations

import runpy
from pathlib import Path

# Make `module_utils/` importable as Ansible and the nodes see it.
runpy.run_path(str(Path(__file__).parents[1] / "unit" / "conftest.py"))
