"""Tests how a job's processes meet over TCP. Threads play the processes; foreign processes of all kinds interfere."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import re
import socket
import threading
import time

import pytest

from overlap.distributed import cards, launchers, ports, rendezvous

pytestmark = pytest.mark.one_jax


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(rendezvous, "_RETRY_EVERY_S", 0.02)


def _place(rank: int, size: int, key: str) -> launchers.Place:
    return launchers.Place("srun", None, size, rank, rank, size, None, "127.0.0.1", key)


def _card(place: launchers.Place, **changes: object) -> cards.Card:
    return dataclasses.replace(cards.own_card(place), **{"pid": 1000 + place.rank} | changes)


def _start(pool, key, size, ranks=None, port=None, timeout_s=20.0, **changes):
    """Starts the given ranks of a job, each in a thread; `changes` apply to the last one's card."""
    ranks = range(size) if ranks is None else ranks
    futures = []
    for rank in ranks:
        place = _place(rank, size, key)
        card = _card(place, **(changes if rank == ranks[-1] else {}))
        futures.append(pool.submit(rendezvous.meet, place, card, port, timeout_s))
    return futures


def _agreed(futures):
    """Returns the agreement, which must be the same for all."""
    agreements = [future.result(30) for future in futures]
    assert agreements[0].held is None or agreements[0].held.close() is None
    assert len({agreement.coordinator for agreement in agreements}) == 1
    assert all(agreement.cards == agreements[0].cards for agreement in agreements)
    return agreements[0]


def _said(futures):
    """Returns the error that each of the threads has raised."""
    return [str(future.exception(30)) for future in futures if isinstance(future.exception(30), RuntimeError)]


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


def test_jobs_meet_apart_though_they_look_at_the_same_ports(pool, monkeypatch):
    """Jobs N and N + 256 of Slurm are an example: computed from the job number mod 4096, their ports are the same."""
    same = ports.candidates("the same for all")
    assert all(1024 < port < 32768 for port in same)
    assert ports.candidates("srun c 300 0 - 2") == ports.candidates("srun c 300 0 - 2")
    assert ports.candidates("srun c 300 0 - 2")[:4] != ports.candidates("srun c 556 0 - 2")[:4]
    monkeypatch.setattr(ports, "candidates", lambda key: same)
    jobs = [_start(pool, key, 2 + number) for number, key in enumerate("abc")]
    met = [_agreed(futures) for futures in jobs]
    assert [[card.rank for card in agreement.cards] for agreement in met] == [[*range(size)] for size in (2, 3, 4)]
    assert [card.pid for card in met[2].cards] == [1000, 1001, 1002, 1003]
    assert len({agreement.coordinator for agreement in met}) == 3


@pytest.mark.parametrize(
    "says", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"overlap-rendezvous []\n", b"\xff" * 100_000]
)
def test_a_foreign_server_on_the_first_port_holds_up_nobody(pool, monkeypatch, says):
    """It accepts connections, and says nothing, or nonsense."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.ExitStack() as kept, contextlib.suppress(OSError):
            while True:
                call = kept.enter_context(server.accept()[0])
                if says is not None:
                    call.sendall(says)

    (thread := threading.Thread(target=serve)).start()
    with server:
        tried = [server.getsockname()[1], *ports.candidates("a")]
        monkeypatch.setattr(ports, "candidates", lambda key: tried)
        _agreed(_start(pool, "a", 2))
        server.shutdown(socket.SHUT_RDWR)  # Ends `accept`.
    thread.join()


def test_foreign_callers_end_no_rendezvous(pool):
    """Garbage, silence, half a line, and a complete call of another job, which is told that it has the wrong port."""
    host = _start(pool, "a", 2, ranks=[0])
    port = _port_of("a", 2)
    open_calls = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    other = rendezvous._line("come", ["b 2", dataclasses.asdict(_card(_place(1, 2, "b")))])
    mine = rendezvous._line("come", ["a 2", dataclasses.asdict(_card(_place(1, 2, "a")))])
    garbage = [b"\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"overlap-rendezvous ", b"overlap-rendezvous {}\n", b"\n",
               b"overlap-rendezvous " + b"x" * 100_000, mine[:-3], mine.replace(b'"rank": 1', b'"rank": "x"'),
               mine.replace(b'"rank": 1', b'"rank": 99'), mine.replace(b'"node"', b'"knot"')]  # fmt: skip
    for call, says in zip(open_calls, garbage):
        with contextlib.suppress(OSError):  # The server may have closed the connection already.
            call.sendall(says)
    with socket.create_connection(("127.0.0.1", port)) as call:
        call.sendall(other)
        assert call.makefile("rb").readline() == rendezvous._line("not here")
    # Silent callers are dropped after the time that a caller may take.
    open_calls[-1].settimeout(5)
    assert open_calls[-1].recv(1) == b""
    assert not host[0].done()
    _agreed(host + _start(pool, "a", 2, ranks=[1]))
    for call in open_calls:
        call.close()


def _port_of(key: str, size: int) -> int:
    """The port on which process 0 of this job listens, as soon as it does."""
    for _ in range(200):
        for port in ports.candidates(f"{key} {size}"):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return port
        time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_missing_ranks_are_named_on_all_that_have_come(pool):
    errors = _said(_start(pool, "a", 6, ranks=[0, 1, 4], timeout_s=0.6))
    expected = "3 of 6 processes did not come to overlap.initialize() within 0.6 s: rank 2, 3, 5. Look at its output"
    assert len(errors) == 3
    assert [error for error in errors if not error.startswith(expected)] == []
    assert "0, 1, 3, 4, 5, 6, 7, 8 and others. Look" in cards.missing([2], 99, 1)
    (error,) = _said(_start(pool, "a", 2, ranks=[1], timeout_s=0.3))
    words = r"rank 0 of 2 has not come .* within 0.3 s: .* rank 1 on 127.*port \d+: ConnectionRefusedError; port"
    assert re.match(words, error)


def test_one_that_came_and_went_has_not_come(pool):
    host = _start(pool, "a", 4, ranks=[0, 2], timeout_s=1)
    with socket.create_connection(("127.0.0.1", _port_of("a", 4))) as call:
        call.sendall(rendezvous._line("come", ["a 4", dataclasses.asdict(_card(_place(1, 4, "a")))]))
        assert b'"here"' in call.makefile("rb").readline()
    assert [re.search(r" s: rank ([\d, ]+)\.", error)[1] for error in _said(host)] == ["1, 3"] * 2


def test_the_end_of_process_0_is_named(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        (guest,) = _start(pool, "a", 2, ranks=[1], port=server.getsockname()[1])
        call, _ = server.accept()
        with call:
            call.recv(4096)
            call.sendall(rendezvous._line("here", 10.0))
        assert _said([guest])[0].startswith(
            "rank 0 of this job ended, or lost its connection, while this process waited"
        )


def test_different_versions_and_a_rank_that_comes_twice_are_named_on_all(pool):
    for package in ("jax", "overlap"):
        errors = _said(_start(pool, "a", 3, **{package: "0.0.7", "host": "gpu9"}))
        assert len(errors) == 3 and len(set(errors)) == 1
        assert f"different versions of {package}: " in errors[0]
        assert "0.0.7 on gpu9. Start all of them with the same Python environment" in errors[0]
    host = _start(pool, "a", 3, ranks=[0, 1])
    time.sleep(0.2)
    errors = _said(host + _start(pool, "a", 3, ranks=[1], pid=77))
    assert len(errors) == 3
    assert all("rank 1 of 3 has come to overlap.initialize() twice" in error for error in errors)
    assert all("as process 77 of" in error for error in errors)


def test_given_ports_and_ports_in_use(pool, monkeypatch):
    """A port is refused even if its owner shares it, as gRPC does: both jobs' coordinators would get the port."""
    with ports.hold_free("127.0.0.1") as port:
        number = port.getsockname()[1]
    assert _agreed(_start(pool, "a", 2, port=number)).coordinator == f"127.0.0.1:{number}"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        (error,) = _said(_start(pool, "a", 2, ranks=[0], port=number))
        assert "cannot be used on" in error and "Address already in use. Pass another one, or leave it out" in error
        monkeypatch.setattr(ports, "candidates", lambda key: [number])
        assert "none of the ports on which the processes of this job would meet" in _said(_start(pool, "a", 2, [0]))[0]
    # A job of one host stays off the network.
    for host, addresses in (("127.0.0.1", {"127.0.0.1"}), ("gpu1", {"::", "0.0.0.0"})):
        with ports.listen(host, 0) as meets, ports.hold_free(host) as held:
            assert {meets.getsockname()[0], held.getsockname()[0]} <= addresses


def test_the_port_found_is_kept_for_the_coordinator_alone(monkeypatch):
    class Socket(socket.socket):
        def bind(self, address):
            # A socket that shares from the start may get a port that another one shares.
            assert not self.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
            super().bind(address)

    with monkeypatch.context() as patch:
        patch.setattr(ports.socket, "socket", Socket)
        ports.hold_free("gpu1").close()
        held = ports.hold_free("127.0.0.1")
    with held, socket.socket() as stranger, socket.socket() as coordinator:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(held.getsockname())
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # As gRPC does.
        coordinator.bind(held.getsockname())


def test_within_a_running_loop(pool):
    """A notebook runs an event loop. The rendezvous must work inside one."""
    import asyncio

    async def cell():
        return rendezvous.meet(_place(0, 2, "a"), _card(_place(0, 2, "a")), None, 20)

    guest = _start(pool, "a", 2, ranks=[1])
    agreement = asyncio.run(cell())
    agreement.held.close()
    assert guest[0].result(20).coordinator == agreement.coordinator


def test_processes_of_one_host_count_each_other():
    places = [_place(rank, 4, "a") for rank in range(4)]
    everyone = [_card(place, node="ab"[place.rank // 2], visible=str(place.rank)) for place in places]
    job = cards.job_of(dataclasses.replace(places[3], local_rank=None, local_size=None), everyone)
    assert (job.size, job.rank, job.local_rank, job.local_size, job.local_visible) == (4, 3, 1, 2, ("2", "3"))
