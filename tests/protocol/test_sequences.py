"""Random sequences of fused launches on shared memory: no launch is mistaken for another (`sequences.py`)."""

import itertools
import types

import pytest

from overlap.primitives import PeerGroup, handshake
from tests.protocol import sequences
from tests.protocol.sequences import Call, Trial, layout

IN_A_CHUNK = 25  # These sequences draw from the same few calls.
# Together these have all kinds and layouts; few of them are on eight devices, which take long.
CHUNKS, LONG = (46, 117, 76, 97, 115, 137, 161), (9, 17, 50)
# Of each chunk in `make test`: how many sequences. Tracing the calls takes longest.
FAST = {115: 3}
PARTS = [
    pytest.param(chunk, range(*part), marks=pytest.mark.slow if slow else [])
    for chunk in (*CHUNKS, *LONG)
    for part, slow in (((0, FAST.get(chunk, 0)), False), ((FAST.get(chunk, 0), IN_A_CHUNK), True))
    if part[1] > part[0]
]


@pytest.mark.parametrize(("chunk", "part"), PARTS, ids=str)
def test_sequences(chunk, part):
    for number in (chunk * IN_A_CHUNK + place for place in part):
        trial = sequences.trial(number)
        fault = sequences.fault_of(trial)
        assert fault is None, f"{trial}\n{fault}"


def test_the_calls_are_of_all_kinds():
    trials = [sequences.trial(chunk * IN_A_CHUNK + number) for chunk in CHUNKS for number in range(15)]
    calls = {call for trial in trials for call in trial.calls}
    assert {call.kind for call in calls} == set(sequences.SHAPES)
    assert len({call.layout for call in calls}) > 8
    for setting in ("completion", "scheduler", "resident", "detect_races"):
        assert len({trial.settings[setting] for trial in trials}) == (3 if setting == "completion" else 2)


SQUARE, TRANSPOSED, LINE, THREE = layout(x=2, y=2), layout(0, 2, 1, 3, x=2, y=2), layout(x=4, y=1), layout(x=3)
SMALL, ROWS = (16, 64, 64), (9, 8, 128)
# Pairs of launches that could be mistaken for each other. The first four have other members, or the same members in
# another order. The next ones share flags of peers' rows. In "sums" and in the last one, whose handshakes have flags at
# the same addresses, a launch that needs one neighbour's memory comes before one that needs all peers'. A device that
# needs only one neighbour leaves without waiting for the others, whose ready flags may still be raised. So the key of
# the ready flag also says which peers a launch looks for.
PAIRS = {
    "axes": (Call(SQUARE, "y", "pull", SMALL), Call(SQUARE, "x", "pull", SMALL)),
    "meshes": (Call(SQUARE, "x", "pull", SMALL), Call(TRANSPOSED, "x", "pull", SMALL)),
    "orders": (Call(SQUARE, ("x", "y"), "pull", SMALL), Call(SQUARE, ("y", "x"), "pull", SMALL)),
    "shapes": (Call(SQUARE, ("x", "y"), "pull", SMALL), Call(LINE, "x", "pull", SMALL)),
    "rows, then sums": (Call(THREE, "x", "rows added", ROWS), Call(THREE, "x", "scatter by ring", SMALL)),
    "rows along other axes": (Call(SQUARE, "y", "rows added", ROWS), Call(SQUARE, "x", "rows added", ROWS)),
    "rows, there and back": (Call(THREE, "x", "rows copied", ROWS), Call(THREE, "x", "rows added", ROWS)),
    "rows arrive, then sums": (Call(THREE, "x", "arriving", (96, 64, 64)), Call(THREE, "x", "rows added", ROWS)),
    "sums": (Call(THREE, "x", "scatter by ring", SMALL), Call(THREE, "x", "scatter m", SMALL)),
    "gather, then sums": (Call(THREE, "x", "ring", (136, 64, 64)), Call(THREE, "x", "one shot", (72, 40, 72))),
}


def faults_of(pair, *, detect, seeds):
    first, second = PAIRS[pair]
    calls = (first, first, second, second) if first.kind == second.kind else (first, second)
    for number in range(seeds):
        settings = {"completion": ("late", "random", "eager")[number % 3], "scheduler": ("pct", "random")[number % 2]}
        fault = sequences.fault_of(Trial(number, calls, settings | {"detect_races": detect, "seed": number}))
        if fault is not None:
            yield fault


@pytest.fixture
def one_key(monkeypatch):
    """Injects a defect: all launches use the same ready flag."""
    sequences.launch_of.cache_clear()
    monkeypatch.setattr(handshake, "_key", lambda context, group, only: [7, 8, 9, 10])
    yield
    sequences.launch_of.cache_clear()


@pytest.mark.parametrize("detect", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", ["axes", pytest.param("meshes", marks=pytest.mark.slow)])
def test_with_one_key_launches_of_other_members_are_mixed_up(pair, detect, one_key):
    fault = next(faults_of(pair, detect=detect, seeds=12), "")
    expected = ("ProtocolError", "RaceError") if detect else ("DeadlockError", "wrong numbers", "ProtocolError")
    assert fault.startswith(expected)


@pytest.mark.parametrize("seeds", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", PAIRS)
def test_with_keys_of_their_own_none_is(pair, seeds):
    for detect in (True, False)[: 1 if seeds == 2 else 2]:
        assert list(faults_of(pair, detect=detect, seeds=seeds)) == []


def key(axes="x", shape=(("x", 4), ("y", 4)), ids=tuple(range(16)), only=None):
    return tuple(handshake._key(types.SimpleNamespace(device_ids=ids), PeerGroup(axes, shape), only))


def test_a_key_says_who_talks_to_whom():
    other = {"axes": "y", "shape": (("x", 4), ("y", 2)), "ids": tuple(range(1, 17)), "only": 3}
    keys = [
        key(**{name: other[name] for name in names}) for n in range(5) for names in itertools.combinations(other, n)
    ]
    assert len(set(keys)) == len(keys) == 16
    assert key(only=1) != key(only=3)


def test_no_key_begins_with_the_word_of_a_lowered_ready_flag(monkeypatch):
    zeros = types.SimpleNamespace(digest=lambda: bytes(32))
    monkeypatch.setattr(handshake, "hashlib", types.SimpleNamespace(sha256=lambda text: zeros))
    assert key()[0] > handshake._LOWERED
