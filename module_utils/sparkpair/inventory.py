"""What an inventory must say before a node is touched: names, types, ranges, and rules that span hosts.

The single source of names, types and choices is each role's `meta/argument_specs.yml`; this module adds the
unknown-name check and the rules that a spec cannot express.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.sparkpair.plan import PlanError, check_mtu, rail_plan

# A QSFP cage is two PCIe functions, so two rails (public hardware reports; see docs/architecture.md).
RAILS_PER_CAGE = 2
PORT_RANGE = (1024, 65535)
UID_RANGE = (100, 59999)
# Below a few cache blocks a prompt hardly moves; above the usual step budget the bound is none (measured on the
# scheduler of 0.32: docs/decisions).
MIXED_RANGE = (64, 8192)
# What the serve role derives itself; a second value on one rank would wedge the pair.
OWNED_OPTIONS = {
    "api-key": "serve_api_key",
    "config": "serve_engine_args",
    "data-parallel-size": "nothing: the hosts share one model",
    "distributed-executor-backend": "nothing: two nodes need mp",
    "headless": "nothing: every rank but the head is headless",
    "host": "serve_bind",
    "master-addr": "fabric_subnet",
    "master-port": "serve_master_port",
    "middleware": "nothing: the guard of the keys",
    "model": "model_name and model_source or model_repo",
    "nnodes": "the hosts of the group sparks",
    "node-rank": "the order of the hosts",
    "pipeline-parallel-size": "nothing: the hosts share one model by tensor parallelism",
    "port": "serve_port",
    "served-model-name": "model_name",
    **dict.fromkeys(
        ("ssl-ca-certs", "ssl-certfile", "ssl-keyfile", "uds"), "nothing: a proxy in front (docs/decisions/0019)"
    ),
    "tensor-parallel-size": "serve_tensor_parallel_size",
}
OWNED_VARIABLES = {
    "DSPARK_ISSUE43_SCHED_DIAG": "serve_sched_diag",
    "DSPARK_MAX_INFLIGHT_PREFILLS": "serve_max_inflight_prefills",
    "DSPARK_MIXED_PREFILL_TOKENS": "serve_mixed_prefill_tokens",
    "DSPARK_PREFILL_POLICY": "serve_prefill_policy",
    "GLOO_SOCKET_IFNAME": "the fabric stage",
    "NCCL_IB_HCA": "serve_hca",
    "NCCL_SOCKET_IFNAME": "the fabric stage",
    "SPARKPAIR_PAIR_DIGEST": "nothing: the role derives it",
    "PYTHONPATH": "nothing: the agent sets it",
    "VLLM_API_KEY": "serve_api_key",
    "VLLM_HOST_IP": "the fabric stage",
    "VLLM_NCCL_SO_PATH": "gpu_nccl_path",
}
MEND = "edit the inventory (group_vars/sparks.yml) and run the playbook again"

Specs = Mapping[str, Mapping[str, Mapping[str, Any]]]
Settings = Mapping[str, Any]

UNUSABLE = "unusable"
"""What the role passes instead of a secret that is not 16 or more printable ASCII characters without blanks."""


def check(
    host: str,
    hosts: Sequence[str],
    settings: Settings,
    specs: Specs,
    addresses: Sequence[str],
    limited_to: Sequence[str] = (),
) -> tuple[list[str], dict[str, Any]]:
    """Every fault of one host's settings, as sentences, and all values with the defaults of the specs filled in.

    `hosts` is the group in rank order, `settings` maps variable names (those that begin with a role's name) to
    templated values, `specs` maps a role to its options (the `options` of an argument spec), `addresses` are the
    management addresses or names of all hosts, `limited_to` the hosts of this run where it was limited.
    """
    if limited_to and set(limited_to) != set(hosts):
        fault = f"{host}: found a run limited to {', '.join(limited_to)}, expected all of sparks: leave --limit out"
        return [fault], {}
    faults = _unknown_names(settings, specs)
    values: dict[str, Any] = {}
    for role, options in specs.items():
        given = {name: value for name, value in settings.items() if name in options}
        # Required variables are the role's own business: it fails with the same spec when it starts.
        lenient = {
            name: {key: value for key, value in option.items() if key not in ("required", "description")}
            for name, option in options.items()
        }
        result = ArgumentSpecValidator(lenient).validate(given)
        faults += [f"role {role}: {message}" for message in result.error_messages]
        values.update(result.validated_parameters)
    if not faults:
        faults = [
            *_cluster_rules(hosts, values, addresses),
            *_fabric_rules(values, len(hosts), addresses),
            *_model_rules(values),
            *_engine_rules(values),
            *_api_rules(values),
            *_gpu_rules(values),
        ]
    return [f"{host}: {fault}; {MEND}" for fault in faults], values


def owner(name: str, roles: Sequence[str]) -> str | None:
    """The role whose prefix a variable carries: the longest role name that fits, or None."""
    fits = [role for role in roles if name.startswith(f"{role}_")]
    return max(fits, key=len) if fits else None


def _unknown_names(settings: Settings, specs: Specs) -> list[str]:
    known = [name for options in specs.values() for name in options]
    faults = []
    for name in sorted(settings):
        if name not in known and owner(name, list(specs)):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "no variable has a name like it"
            faults.append(f"found the unknown variable {name}, expected one that a role declares: {hint}")
    return faults


def _cluster_rules(hosts: Sequence[str], values: Settings, addresses: Sequence[str]) -> list[str]:
    faults = []
    for address in sorted({a for a in addresses if list(addresses).count(a) > 1}):
        faults.append(f"found ansible_host {address} on more than one host, expected an address for each Spark")
    ranks = int(values["serve_tensor_parallel_size"])
    if len(hosts) < 2:
        faults.append(f"found {len(hosts)} host in the group sparks, expected at least 2: one line for each Spark")
    elif len(hosts) != ranks:
        faults.append(
            f"found {len(hosts)} hosts in the group sparks with serve_tensor_parallel_size={ranks}, "
            f"expected as many hosts as ranks (each Spark has one GPU)"
        )
    if not MIXED_RANGE[0] <= int(values["serve_mixed_prefill_tokens"]) <= MIXED_RANGE[1]:
        faults.append(
            f"found serve_mixed_prefill_tokens={values['serve_mixed_prefill_tokens']}, "
            f"expected {MIXED_RANGE[0]} to {MIXED_RANGE[1]} tokens"
        )
    ports = {name: int(values[name]) for name in ("serve_port", "serve_master_port", "serve_agent_port", "model_port")}
    for name in ports:
        low, high = PORT_RANGE
        if not low <= int(values[name]) <= high:
            faults.append(f"found {name}={values[name]}, expected a port from {low} to {high}")
    closed = values["fabric_closed_ports"]
    if values["fabric_firewall"] and ports["serve_master_port"] not in closed:
        faults.append(
            f"found serve_master_port={ports['serve_master_port']} outside fabric_closed_ports {closed}, "
            f"expected it there: the rendezvous listens on every address"
        )
    if len(set(ports.values())) < len(ports):
        shown = ", ".join(f"{name}={port}" for name, port in ports.items())
        faults.append(f"found {shown}, expected a port of its own for each")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", str(values["serve_user"])) or values["serve_user"] == "root":
        faults.append(f"found serve_user={values['serve_user']!r}, expected the name of a user of its own")
    if not UID_RANGE[0] <= int(values["serve_uid"]) <= UID_RANGE[1]:
        faults.append(f"found serve_uid={values['serve_uid']}, expected {UID_RANGE[0]} to {UID_RANGE[1]}")
    return faults


def _fabric_rules(values: Settings, nodes: int, addresses: Sequence[str]) -> list[str]:
    faults = []
    for rule in (
        lambda: check_mtu(values["fabric_mtu"]),
        lambda: rail_plan(
            str(values["fabric_subnet"]), RAILS_PER_CAGE, nodes, {f"management address {a}": a for a in addresses}
        ),
    ):
        try:
            rule()
        except PlanError as error:
            faults.append(str(error))
    return faults


def _model_rules(values: Settings) -> list[str]:
    name, repo, source = (str(values.get(key) or "") for key in ("model_name", "model_repo", "model_source"))
    revision, faults = str(values.get("model_revision") or ""), []
    # The symlink to the model in use is a neighbour of the models.
    if name == "current" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        faults.append(
            f"found model_name={name!r}, expected letters, digits, dot, dash or underscore, and not 'current'"
        )
    if not repo and not source:
        faults.append("found neither model_repo nor model_source, expected one: where the weights come from")
    elif not source and not re.fullmatch(r"[0-9a-f]{40}", revision):
        faults.append(
            f"found model_revision={revision!r}, expected the commit of model_repo that you trust (40 "
            f"hexadecimal digits): in the inventory, or with -e model_revision=…"
        )
    if int(values["verify_tokens"]) < 1:
        faults.append(f"found verify_tokens={values['verify_tokens']}, expected 1 or more")
    return faults


def _engine_rules(values: Settings) -> list[str]:
    faults = []
    for name, value in values["serve_engine_args"].items():
        if value is None:
            faults.append(f"found no value for {name} in serve_engine_args, expected one (true for a switch)")
        if value is False:
            # Its file of options drops a switch that is false, and the default stays (read and tried in 0.32).
            other = str(name).removeprefix("no-") if str(name).startswith("no-") else f"no-{name}"
            faults.append(f"found {name}: false in serve_engine_args, which vLLM passes over; expected {other}: true")
        if f"no-{name}" in values["serve_engine_args"]:
            faults.append(f"found both {name} and no-{name} in serve_engine_args, expected one of them")
        plain = str(name).lstrip("-").replace("_", "-")
        if plain != name or not re.fullmatch(r"[a-z][a-z0-9-]*", plain):
            faults.append(
                f"found the option {name!r} in serve_engine_args, expected the long name without dashes: {plain}"
            )
        elif plain in OWNED_OPTIONS:
            faults.append(f"found {name} in serve_engine_args, expected it to be set by {OWNED_OPTIONS[plain]}")
    for name, value in values["serve_environment"].items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            faults.append(
                f"found the variable name {name!r} in serve_environment, expected letters, digits and underscore"
            )
        elif not isinstance(value, str | int | float) or isinstance(value, bool):
            faults.append(f"found {name}={value!r} in serve_environment, expected text or a number: quote it")
        elif str(value) == "" or not str(value).isprintable():
            # An empty NCCL variable hides the value of its configuration file.
            faults.append(f"found {name}={value!r} in serve_environment, expected one line of text that is not empty")
        elif str(name) in OWNED_VARIABLES:
            faults.append(f"found {name} in serve_environment, expected it to be set by {OWNED_VARIABLES[str(name)]}")
    return faults


def _api_rules(values: Settings) -> list[str]:
    bind = str(values["serve_bind"])
    if values.get("serve_api_key") == UNUSABLE:
        return [
            "found a serve_api_key that is short or odd, expected keys of 16 or more printable characters without "
            "blanks, one a line"
        ]
    try:
        ipaddress.ip_address(bind)
    except ValueError:
        return [f"found serve_bind={bind!r}, expected an IP address (127.0.0.1 keeps the API on the head)"]
    return []


def _gpu_rules(values: Settings) -> list[str]:
    faults = []
    if values["gpu_apt_uri"] and not values["gpu_apt_keyring"]:
        faults.append(
            f"found gpu_apt_uri={values['gpu_apt_uri']} without gpu_apt_keyring, expected the key that signs it, whose "
            f"fingerprint is gpu_apt_fingerprint"
        )
    path = str(values["gpu_nccl_path"])
    if path and not path.startswith("/"):
        faults.append(f"found gpu_nccl_path={path!r}, expected an absolute path on the nodes, or nothing")
    return faults
