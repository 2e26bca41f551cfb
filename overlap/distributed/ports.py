"""Chooses the TCP ports of a job, and holds a port until jax's coordinator has it."""

from __future__ import annotations

import hashlib
import os
import socket

THIS_HOST = "127.0.0.1"

# Ports 20000 to 29999: below the ports that Linux gives to outgoing connections, above the ports of most services.
_FIRST = 20000
_COUNT = 10000
_TRIED = 16


def candidates(key: str) -> list[int]:
    """The ports at which the processes of a job look for each other, in the order to try. They follow from `key`."""
    digest = hashlib.shake_256(key.encode()).digest(4 * _TRIED)
    return [_FIRST + int.from_bytes(digest[4 * i : 4 * i + 4]) % _COUNT for i in range(_TRIED)]


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on this host and port. Raises OSError if another socket listens there."""
    if host == THIS_HOST:  # Nobody outside this host can connect to a job of one host.
        return socket.create_server((THIS_HOST, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def listen_on_given(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on the user's `coordinator_port`.

    jax itself would not notice that the port is taken: gRPC shares its port with any other gRPC server of the same user
    (SO_REUSEPORT). Two jobs with the same port would then get each other's processes.

    Raises:
      RuntimeError: if the port is not free.
    """
    try:
        return listen(host, port)
    except OSError as error:
        raise RuntimeError(
            f"`coordinator_port`={port} cannot be used on {socket.gethostname()}, the host of process 0: "
            f"{os.strerror(error.errno or 0)}. Pass another one, or leave it out, and a free one is chosen."
        ) from error


def hold_free(host: str) -> socket.socket:
    """Binds a socket to a free port, without listening, and returns the socket.

    While the socket is open, no other program can bind the port, except a program that sets SO_REUSEPORT too, as gRPC
    does. Without the socket, another process could get the port before jax's coordinator has it.
    """
    if host != THIS_HOST and socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
    else:
        held = socket.socket()
        held.bind((host if host == THIS_HOST else "", 0))
    # Set it only after binding: a socket with SO_REUSEPORT from the start may get a port that another socket shares.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held
