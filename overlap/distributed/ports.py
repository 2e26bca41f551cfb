"""Which ports a job uses, and how one is held until jax's coordinator has it."""

from __future__ import annotations

import hashlib
import operator
import os
import socket
from typing import Any

THIS_HOST = "127.0.0.1"

# Below the ports that Linux gives to outgoing connections (from 32768 on), above those of most services.
_FIRST, _COUNT = 20000, 10000
_TRIED = 16


def check_port(port: Any) -> int | None:
    """`coordinator_port` as a number, or None.

    Raises:
      ValueError: if it is no port.
    """
    if port is None:
        return None
    try:
        number = operator.index(port)
    except TypeError:
        number = None
    if number is None or isinstance(port, bool) or not 0 < number < 65536:
        raise ValueError(
            f"`coordinator_port` has to be a TCP port, a whole number from 1 to 65535, and is {port!r}. Leave it out, "
            "and a free one is chosen."
        )
    return number


def candidates(key: str) -> list[int]:
    """Where the processes of a job look for each other: ports that follow from the job's key, in the order to try."""
    digest = hashlib.shake_256(key.encode()).digest(4 * _TRIED)
    return [_FIRST + int.from_bytes(digest[4 * i : 4 * i + 4]) % _COUNT for i in range(_TRIED)]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this host and port; OSError if another one does."""
    if host == THIS_HOST:  # A job of one host stays off the network.
        return socket.create_server((THIS_HOST, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def listen_on_given(host: str, port: int) -> socket.socket:
    """`listen` for a `coordinator_port`.

    jax itself would not notice that the port is taken: gRPC shares its port with any other gRPC server of the same user
    (SO_REUSEPORT), and then two jobs get each other's processes.

    Raises:
      RuntimeError: if it is not free.
    """
    try:
        return listen(host, port)
    except OSError as error:
        raise RuntimeError(
            f"`coordinator_port`={port} cannot be used on {socket.gethostname()}, the host of process 0: "
            f"{os.strerror(error.errno or 0)}. Pass another one, or leave it out, and a free one is chosen."
        ) from error


def hold_free(host: str) -> socket.socket:
    """A socket that is bound to a free port and does not listen: while it is open, nobody but gRPC gets the port.

    Without it another process could be given the same port before jax's coordinator has it.
    """
    if host != THIS_HOST and socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
    else:
        held = socket.socket()
        held.bind((host if host == THIS_HOST else "", 0))
    # Only after binding: a socket that shares from the start may be given a port that another one shares.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held
