"""The cards that the processes of a job exchange when they meet, and the error messages if these do not fit."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Collection, Sequence

import jax

from overlap._version import __version__
from overlap.distributed.launchers import Place


@dataclasses.dataclass(frozen=True)
class Card:
    """How a process describes itself to the others.

    Attributes:
      rank: the rank of the process in the whole job.
      node: the name of its host. Processes with the same `node` share a host.
      host, pid: host name and process id, for messages.
      jax, overlap: the versions of these packages.
      visible: the value of CUDA_VISIBLE_DEVICES, or None.
    """

    rank: int
    node: str
    host: str
    pid: int
    jax: str
    overlap: str
    visible: str | None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What all processes of a job have agreed on.

    Attributes:
      coordinator: host and port of process 0's coordinator.
      cards: the cards of all processes, in the order of their ranks.
      held: on process 0, the socket that keeps the port until the coordinator has it; else None.
    """

    coordinator: str
    cards: tuple[Card, ...]
    held: socket.socket | None


@dataclasses.dataclass(frozen=True)
class Job:
    """This process's place in a job whose processes have met.

    Attributes:
      launcher, mpi: as in `Place`.
      size, rank: the number of processes of the whole job, and the rank of this process among them.
      local_rank, local_size: this process's rank among the processes of its host, and the number of these.
      local_visible: CUDA_VISIBLE_DEVICES of each process on this host, in the order of their ranks.
    """

    launcher: str
    mpi: str | None
    size: int
    rank: int
    local_rank: int
    local_size: int
    local_visible: tuple[str | None, ...]


def own_card(place: Place) -> Card:
    """Makes the card of this process."""
    host = socket.gethostname()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Card(place.rank, place.node or host, host, os.getpid(), jax.__version__, __version__, visible)


def job_of(place: Place, cards: Sequence[Card]) -> Job:
    """Makes the `Job` from this process's place and the cards of all processes, in the order of their ranks."""
    mates = [card for card in cards if card.node == cards[place.rank].node]
    local_rank = [card.rank for card in mates].index(place.rank) if place.local_rank is None else place.local_rank
    visible = tuple(card.visible for card in mates)
    return Job(place.launcher, place.mpi, place.size, place.rank, local_rank, len(mates), visible)


def check_versions(cards: Sequence[Card]) -> None:
    """Raises RuntimeError, on all processes, unless all of them run the same versions of jax and overlap."""
    for package in ("jax", "overlap"):
        ranks: dict[str, list[Card]] = {}
        for card in cards:
            ranks.setdefault(getattr(card, package), []).append(card)
        if len(ranks) > 1:
            hosts = {version: ", ".join(sorted({card.host for card in having})) for version, having in ranks.items()}
            parts = [
                f"{version} on {of_ranks([card.rank for card in having])} ({hosts[version]})"
                for version, having in ranks.items()
            ]
            raise RuntimeError(
                f"the processes of this job run different versions of {package}: {'; '.join(parts)}. Start all of them "
                "with the same Python environment."
            )


def missing(came: Collection[int], size: int, timeout_s: float) -> str:
    """The message that names the ranks that have not come within `timeout_s` seconds.

    `came`: the ranks that have come; `size`: the number of ranks.
    """
    absent = [rank for rank in range(size) if rank not in came]
    one = len(absent) == 1
    return (
        f"{of_ranks(absent)} of {size} {'has' if one else 'have'} not come to overlap.initialize() within "
        f"{timeout_s:g} s ({of_ranks(sorted(came))} came). Look at {'its' if one else 'their'} output: ended early, "
        "stuck before the call, or still starting? `timeout_s` sets the limit."
    )


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, for messages: "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts)}"
