"""Lets the processes of a job meet over TCP: they exchange cards and learn the coordinator's port.

The job's key determines a list of ports. Process 0 listens on the first free port of the list. The other processes try
each port in turn, with the key and a card, until process 0 of their own job answers. Process 0 answers "here" at once,
and sends the cards of all processes when all have come. A process with another key is told "not here" and keeps
looking. A connection that says anything else, or nothing, is closed. So jobs that share a port of their lists, port
scanners and left-over processes do not disturb a job.

The key tells apart jobs that do not know each other. It is no secret, and does not protect against an attacker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from overlap.distributed import cards, ports
from overlap.distributed.cards import Agreement, Card
from overlap.distributed.launchers import Place

_MAGIC = b"overlap-rendezvous "
_CARD_BYTES = 4096
_ALL_CARDS_BYTES = 1 << 26
# How long either side of a connection may take to connect, to send its key and card, or to answer.
_PATIENCE_S = 2.0
# The other processes wait by this much longer than process 0, so that they receive its error message.
_LONGER_S = 5.0
_RETRY_EVERY_S = 0.1


def meet(place: Place, card: Card, coordinator_port: int | None, timeout_s: float) -> Agreement:
    """Waits for all processes of the job.

    Args:
      place: the place of this process in the job.
      card: the card of this process.
      coordinator_port: the TCP port for the rendezvous and then for jax's coordinator; None: free ones.
      timeout_s: how long to wait, in seconds.

    Returns:
      The agreement, the same on all processes.

    Raises:
      RuntimeError: on all processes that have come, if another process has not come in time, if a rank has come twice,
        or if versions differ; on process 0, if `coordinator_port` is not free.
    """
    if place.rank == 0:
        return _run(_Host(place, card, coordinator_port, timeout_s).hold())
    tried = [coordinator_port] if coordinator_port else ports.candidates(_key(place))
    return _run(_attend(place, card, tried, timeout_s))


def _key(place: Place) -> str:
    return f"{place.key} {place.size}"


def _run(work: Coroutine[Any, Any, Agreement]) -> Agreement:
    if not _in_a_loop():
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # A notebook already runs an event loop here.
        return pool.submit(asyncio.run, work).result()


def _in_a_loop() -> bool:
    # This `except` must not enclose the work itself: its errors would be shown as raised while handling this one.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _line(kind: str, content: object = None) -> bytes:
    return _MAGIC + json.dumps([kind, content]).encode() + b"\n"


async def _read(reader: asyncio.StreamReader, timeout_s: float) -> tuple[str, Any] | None:
    """Reads a message: its kind and content. None if the message is not overlap's, or does not come in time."""
    try:
        async with asyncio.timeout(timeout_s):
            # The other side may be any program, and may never end its line.
            if await reader.readexactly(len(_MAGIC)) != _MAGIC:
                return None
            kind, content = json.loads(await reader.readline())
    except (OSError, EOFError, ValueError, TypeError):  # TimeoutError is an OSError; too long a line, a ValueError.
        return None
    return (kind, content) if isinstance(kind, str) else None


def _card_from(content: Any) -> Card | None:
    try:
        card = Card(**content)
    except TypeError:
        return None
    return card if isinstance(card.rank, int) else None


# --- Process 0 --------------------------------------------------------------------------------------------------------


class _Host:
    """Process 0, which waits for the other processes.

    Attributes:
      came: what each process that has come says of itself (its `Card`), by rank.
      guests: the connections to them, by rank.
      ended: set when all have come, or when a rank has come twice.
      fault: the error message if a rank has come twice, else None.
    """

    def __init__(self, place: Place, card: Card, coordinator_port: int | None, timeout_s: float) -> None:
        self.place = place
        self.coordinator_port = coordinator_port
        self.timeout_s = timeout_s
        self.until = time.monotonic() + timeout_s
        self.came: dict[int, Card] = {0: card}
        self.guests: dict[int, asyncio.StreamWriter] = {}
        self.fault: str | None = None
        self.ended = asyncio.Event()

    async def hold(self) -> Agreement:
        """Waits until all processes have come or the time is over, and sends the result to those that have come."""
        host = str(self.place.host)
        server = await asyncio.start_server(self._receive, sock=self._listen(host), limit=_CARD_BYTES)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                await self.ended.wait()
        # From here on, a process that comes is too late, and a process that leaves counts as having come.
        self.ended.set()
        # If `coordinator_port` was given, the coordinator needs the port on which the rendezvous has listened.
        server.close()
        everyone = [self.came[rank] for rank in sorted(self.came)]
        try:
            if self.fault is not None:
                raise RuntimeError(self.fault)
            if len(everyone) < self.place.size:
                raise RuntimeError(cards.missing(self.came, self.place.size, self.timeout_s))
            cards.check_versions(everyone)
        except RuntimeError as error:
            await self._tell(_line("error", str(error)))
            raise
        held = None if self.coordinator_port else ports.hold_free(host)
        port = self.coordinator_port if held is None else held.getsockname()[1]
        coordinator = f"{host}:{port}"
        await self._tell(_line("all", [coordinator, [dataclasses.asdict(card) for card in everyone]]))
        return Agreement(coordinator, tuple(everyone), held)

    def _listen(self, host: str) -> socket.socket:
        if self.coordinator_port:
            return ports.listen_on_given(host, self.coordinator_port)
        tried = ports.candidates(_key(self.place))
        for port in tried:
            with contextlib.suppress(OSError):
                return ports.listen(host, port)
        raise RuntimeError(
            f"none of the ports on which the processes of this job would meet is free on {socket.gethostname()} "
            f"({', '.join(map(str, tried))}). Pass `coordinator_port`, one that is free there."
        )

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection: takes its card, and keeps it open until the rendezvous has ended."""
        rank = None
        try:
            said = await _read(reader, _PATIENCE_S)
            if said is None or said[0] != "come" or not isinstance(said[1], list) or len(said[1]) != 2:
                return
            key = said[1][0]
            card = _card_from(said[1][1])
            if key != _key(self.place) or card is None or not 0 <= card.rank < self.place.size:
                writer.write(_line("not here"))
                await writer.drain()
                return
            if self.ended.is_set():
                return
            if card.rank in self.came:
                self.fault = self._came_twice(self.came[card.rank], card)
                writer.write(_line("error", self.fault))
                await writer.drain()
                self.ended.set()
                return
            rank = card.rank
            self.came[rank] = card
            self.guests[rank] = writer
            writer.write(_line("here", self.until - time.monotonic()))
            if len(self.came) == self.place.size:
                self.ended.set()
            await reader.read()  # Until the guest leaves. A guest that leaves before the rendezvous ends has not come.
            if not self.ended.is_set():
                del self.came[rank], self.guests[rank]
        except OSError:
            if rank is not None and not self.ended.is_set():
                del self.came[rank], self.guests[rank]
        finally:
            if rank is None:
                writer.close()

    def _came_twice(self, first: Card, second: Card) -> str:
        place = self.place
        return (
            f"rank {first.rank} of {place.size} has come to overlap.initialize() twice, as process {first.pid} of "
            f"{first.host} and as process {second.pid} of {second.host}. Start one program per task of "
            f"{place.launcher}, not several side by side."
        )

    async def _tell(self, line: bytes) -> None:
        """Sends the final message to all guests. If a guest has died meanwhile, jax notices that it is missing."""
        for writer in list(self.guests.values()):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    writer.write(line)
                    await writer.drain()
            writer.close()
        for writer in list(self.guests.values()):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await writer.wait_closed()


# --- The other processes ----------------------------------------------------------------------------------------------


async def _attend(place: Place, card: Card, tried: Sequence[int], timeout_s: float) -> Agreement:
    """Tries the ports until process 0 answers, and waits for its final message."""
    until = time.monotonic() + timeout_s
    call = _line("come", [_key(place), dataclasses.asdict(card)])
    answers: dict[int, str] = {}  # By port, why there is no agreement.
    while time.monotonic() < until:
        for port in tried:
            answer = await _try_port(str(place.host), port, call)
            if isinstance(answer, Agreement):
                return answer
            answers[port] = answer
        await asyncio.sleep(_RETRY_EVERY_S)
    found = "; ".join(f"port {port}: {answer}" for port, answer in answers.items())
    raise RuntimeError(
        f"rank 0 of {place.size} has not come to overlap.initialize() within {timeout_s:g} s: it does not answer rank "
        f"{place.rank} on {place.host} ({found}). Look at its output: ended early, stuck before the call, still "
        "starting, or behind a firewall (then pass `coordinator_port`, one that is open)? `timeout_s` sets the limit."
    )


async def _try_port(host: str, port: int, call: bytes) -> Agreement | str:
    """Tries one port. Returns the agreement, or the reason why there is none."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_ALL_CARDS_BYTES)
    except OSError as error:
        return type(error).__name__
    try:
        writer.write(call)
        answer = await _read(reader, _PATIENCE_S)
        if answer is None:
            return "not overlap's"
        if answer[0] == "here":
            last = await _read(reader, answer[1] + _LONGER_S)
            if last is None:
                raise RuntimeError(
                    "rank 0 of this job ended, or lost its connection, while this process waited in "
                    f"overlap.initialize() for the others ({host}:{port}). Look at its output."
                )
            answer = last
        if answer[0] == "error":
            raise RuntimeError(answer[1])
        if answer[0] == "all":
            coordinator, everyone = answer[1]
            return Agreement(coordinator, tuple(Card(**card) for card in everyone), None)
        return "another job's"
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()
