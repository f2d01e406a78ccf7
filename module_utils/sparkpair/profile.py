"""What a profile must say: a model, its revision and the options that belong together, with the evidence for them.

A profile is a file of variables that stands above the inventory and below the command line. So it has to say all that
belongs together, or a part of another model would shine through from the inventory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

VERIFIED = "verified in lab"
EVIDENCE = ("from public report", VERIFIED)

OWN: Mapping[str, Mapping[str, Any]] = {
    "profile_text": {"type": "str", "required": True},
    "profile_evidence": {"type": "str", "required": True, "choices": EVIDENCE},
    "profile_sources": {"type": "list", "elements": "str", "required": True},
}
"""What a profile says about itself."""

TOGETHER = ("model_name", "model_repo", "model_source", "model_revision", "serve_engine_args")
"""Variables of roles that every profile sets."""

ALLOWED = ("model_", "serve_")
"""Prefixes of what a profile may set: the rest belongs to the machines, not to the model."""


def check(name: str, content: Any, specs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return every fault of a profile as a sentence; ``specs`` maps a role to the options of its argument spec."""
    where = f"profiles/{name}.yml"
    if not isinstance(content, dict):
        return [f"found {where} with {type(content).__name__} in it, expected variables"]
    options = {
        key: {k: v for k, v in option.items() if k not in ("description", "required")}
        for role in specs.values()
        for key, option in role.items()
        if key.startswith(ALLOWED)
    }
    faults = [
        f"found {key} in {where}, expected variables that begin with {' or '.join(ALLOWED)} and that a role declares"
        for key in sorted(set(content) - set(options) - set(OWN))
    ]
    faults += [
        f"found no {key} in {where}, expected it: what belongs together" for key in TOGETHER if key not in content
    ]
    known = {key: value for key, value in content.items() if key in options or key in OWN}
    result = ArgumentSpecValidator({**options, **OWN}).validate(known)
    faults += [f"{where}: {message}" for message in result.error_messages]
    if any(key.endswith(("_token", "_key")) for key in content):
        faults.append(f"found a secret in {where}, expected it in a vault of the inventory")
    if not faults and not content["profile_sources"]:
        faults.append(f"found no source in profile_sources of {where}, expected where its numbers come from")
    return faults
