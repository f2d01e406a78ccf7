"""A command as a transient unit of the service user: its limits, a bounded time, and nothing that stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def service_command(
    user: str,
    groups: Sequence[str],
    argv: Sequence[str],
    seconds: int,
    variables: Mapping[str, str],
    credential: Path | None = None,
) -> list[str]:
    """`argv` run by systemd as `user`, whom it makes up while no such user exists, for at most `seconds`.

    `credential` is a file that only this unit may read, as `secret` in $CREDENTIALS_DIRECTORY. Output comes back.
    """
    properties = {
        "User": user,
        "DynamicUser": "yes",
        "LimitMEMLOCK": "infinity",
        "LimitNOFILE": "1048576",
        "RuntimeMaxSec": str(seconds),
        "TimeoutStopSec": "5",
        "WorkingDirectory": "/tmp",
    }
    if groups:
        properties["SupplementaryGroups"] = " ".join(groups)
    if credential is not None:
        properties["LoadCredential"] = f"secret:{credential}"
    return [
        *("systemd-run", "--wait", "--pipe", "--collect", "--quiet", "--service-type=exec"),
        *(f"--property={name}={value}" for name, value in properties.items()),
        *(f"--setenv={name}={value}" for name, value in variables.items()),
        *argv,
    ]
