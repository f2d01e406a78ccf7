"""Connect to a node from outside the lab: the ProxyCommand of the lab's SSH configuration.

    python3 ssh_proxy.py NAMESPACE ADDRESS PORT

Only this process enters the network namespace. It connects there, hands the connected socket to ssh
(ProxyUseFdpass) and ends; a socket stays in the namespace that it was made in. The machine needs no route into the
lab. Standard library only, and few imports: it runs before every connection.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWNET = 0x40000000
"""From linux/sched.h."""


def enter(namespace: str) -> None:
    """Move this process into the named network namespace; raises OSError."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(handle)


def main(namespace: str, address: str, port: str) -> int:
    try:
        enter(namespace)
    except FileNotFoundError:
        print("lab: the lab is not up; start it with `lab.py up`", file=sys.stderr)
        return 1
    except PermissionError:
        print("lab: only root can reach the lab's nodes", file=sys.stderr)
        return 1
    try:
        connection = socket.create_connection((address, int(port)), timeout=5)
    except OSError as error:
        print(f"lab: {address} port {port}: {error.strerror or error}", file=sys.stderr)
        return 1
    connection.setblocking(True)
    with socket.socket(fileno=os.dup(1)) as ssh:
        socket.send_fds(ssh, [b"\0"], [connection.fileno()])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
