#!/usr/bin/python
"""Ansible module: begin an acceptance report, or judge one of its layers, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: accept_layer
short_description: Judge one layer of the acceptance gate and write it into the report
description:
  - Without O(layer) it begins a report, and says whether the costly layers are due.
  - A layer that fails fails the task, with what was found, what was expected and what mends it.
  - Run it on the controller. It writes a JSON file and a Markdown file beside it, and nothing else.
options:
  layer: {description: The layer that is judged, type: str, default: ""}
  nodes: {description: Names of the nodes in rank order, type: list, elements: str, required: true}
  evidence:
    description: Registered results of the layer's module in rank order.
    type: list
    elements: raw
    default: []
  settings: {description: What the layer needs to know besides, type: dict, default: {}}
  report: {description: "The report: a folder to begin one, its file to go on", type: path, required: true}
  kept: {description: "Digests that the nodes kept, in rank order, to begin", type: list, elements: str, default: []}
  always: {description: "Layers are due although the digests are those that were kept", type: bool, default: true}
  stop: {description: Fail the task when the layer fails, type: bool, default: true}
attributes:
  check_mode: {support: full, description: Judges and writes nothing}
  diff_mode: {support: none, description: A report is no change}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Judge the PCIe width
  accept_layer:
    layer: link_width
    nodes: [spark-a, spark-b]
    evidence: [{}, {}]
    report: reports/accept-20260101T000000Z.json
  delegate_to: localhost
"""

RETURN = r"""
report: {description: Path of the report, type: str, returned: always}
digests: {description: "Digest of each node's inputs, when a report begins", type: list, returned: success}
due: {description: "Whether layers have to run, when a report begins", type: bool, returned: success}
status: {description: "pass, fail or skip", type: str, returned: always}
exit_code: {description: Exit code of the layer, type: int, returned: always}
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import accept, files


def write(path: Path, report: dict[str, Any]) -> None:
    """Both forms of the report."""
    files.put(path, (json.dumps(report, indent=1) + "\n").encode())
    files.put(path.with_suffix(".md"), accept.markdown(report).encode())


def main() -> None:
    words = {"type": "list", "elements": "str"}
    module = AnsibleModule(
        argument_spec={
            "layer": {"type": "str", "default": "", "choices": ["", *accept.LAYERS]},
            "nodes": {**words, "required": True},
            "evidence": {"type": "list", "elements": "raw", "default": []},
            "settings": {"type": "dict", "default": {}},
            "report": {"type": "path", "required": True},
            "kept": {**words, "default": []},
            "always": {"type": "bool", "default": True},
            "stop": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    path, nodes, evidence = Path(p["report"]), p["nodes"], [part or {} for part in p["evidence"]]
    if not p["layer"]:
        now = datetime.now(UTC)
        path = path / f"accept-{now:%Y%m%dT%H%M%SZ}.json"
        known = all(part.get("node") for part in evidence)
        digests = [accept.inputs_digest(part["node"], p["settings"]) for part in evidence] if known else []
        due = p["always"] or not known or digests != p["kept"]
        if due and not module.check_mode:
            write(path, accept.new_report(nodes, f"{now:%Y-%m-%d %H:%M:%S} UTC"))
        module.exit_json(changed=False, report=str(path), digests=digests, due=due, status="pass", exit_code=0)
    layer = accept.JUDGES[p["layer"]](nodes, evidence, p["settings"])
    if not module.check_mode:
        write(path, accept.add(json.loads(path.read_text(encoding="utf-8")), layer))
    told = {"report": str(path), "status": layer.status, "exit_code": layer.code, "found": layer.found}
    if layer.status == "fail" and p["stop"]:
        text = f"{layer.layer}: found {layer.found}; expected {layer.expected}; what mends it: {layer.remedy}"
        module.fail_json(msg=f"{text} (exit code {layer.code}, report {path})", **told)
    module.exit_json(changed=False, **told)


if __name__ == "__main__":
    main()
