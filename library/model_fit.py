#!/usr/bin/python
"""Ansible module: whether a model fits a node, before anything is downloaded."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_fit
short_description: Refuse a model that does not fit the node's disk or memory
description:
  - Compares what is still to be written, with a margin, with the free space below O(root).
  - Compares weights and KV cache of a rank with the node's memory. What it does not know, it says. Changes nothing.
options:
  node: {description: Name of the node in messages, type: str, required: true}
  root: {description: Folder of all models, type: path, default: /var/lib/sparkpair/models}
  name: {description: Name of the model, type: str, required: true}
  revision: {description: Its revision, type: str, required: true}
  size: {description: Bytes of all its files; 0 when not known, type: int, required: true}
  weights: {description: Bytes of its weights; 0 when not known, type: int, required: true}
  config: {description: The values of its config.json that count, type: dict, required: true}
  engine: {description: Options of vllm serve by their long names, type: dict, required: true}
  ranks: {description: Ranks that share the model, type: int, required: true}
  memory_check: {description: Whether a model that does not fit the memory is refused, type: bool, default: true}
attributes:
  check_mode: {support: full, description: Changes nothing}
  diff_mode: {support: none, description: Changes nothing}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Refuse weights that do not fit
  model_fit:
    node: spark-a
    name: qwen3-4b
    revision: cdbee75f17c01a7cc42f958dc650907174af0554
    size: 8061000000
    weights: 8045000000
    config: {model_type: qwen3, num_hidden_layers: 36, num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128}
    engine: {max-model-len: 32768}
    ranks: 2
"""

RETURN = r"""
fits: {description: Whether a rank fits the memory; null when it cannot be told, type: bool, returned: success}
text: {description: The verdict with its numbers, type: str, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.model import ModelError, Place, present_bytes, read_manifest, require_space
from ansible.module_utils.sparkpair.model_fit import judge
from ansible.module_utils.sparkpair.node import parse_meminfo, read_text

# Exists while the node's rank runs; what it holds is not missing for the next one.
RUNNING = Path("/sys/fs/cgroup/system.slice/sparkpair-rank.service")


def main() -> None:
    """Run the module."""
    needed = {"required": True}
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", **needed},
            "root": {"type": "path", "default": "/var/lib/sparkpair/models"},
            "name": {"type": "str", **needed},
            "revision": {"type": "str", **needed},
            "size": {"type": "int", **needed},
            "weights": {"type": "int", **needed},
            "config": {"type": "dict", **needed},
            "engine": {"type": "dict", **needed},
            "ranks": {"type": "int", **needed},
            "memory_check": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    place = Place(Path(p["root"]), p["name"], p["revision"])
    try:
        if read_manifest(place.path) is None:
            require_space(place.root, max(0, p["size"] - present_bytes(place)))
    except (ModelError, OSError) as error:
        module.fail_json(msg=f"{p['node']}: {error}")
    memory = parse_meminfo(read_text(Path("/proc/meminfo")))
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    verdict = judge(p["node"], total, available, p["weights"], p["config"], p["engine"], p["ranks"])
    if verdict.fits is False and p["memory_check"]:
        module.fail_json(msg=f"{verdict.text}; -e model_memory_check=false skips this check")
    if verdict.short and not RUNNING.exists():
        module.warn(verdict.short)
    module.exit_json(changed=False, fits=verdict.fits, text=verdict.text)


if __name__ == "__main__":
    main()
