"""Random sequences of fused launches on shared memory: no launch is mistaken for another (see `tests.sequences`)."""

import itertools
import types

import pytest

from overlap.primitives import PeerGroup, handshake
from tests import sequences
from tests.sequences import Call, Layout, Trial, layout

IN_A_CHUNK, MOST = 25, 15
# These have all kinds and layouts, few of them on eight devices, which take long.
CHUNKS, LONG = (46, 76, 97, 115, 117, 137, 161), (9, 17, 50)
PARTS = [
    pytest.param(chunk, part, marks=[] if chunk in CHUNKS and part.start == 0 else pytest.mark.slow)
    for chunk in (*CHUNKS, *LONG)
    for part in (range(MOST), range(MOST, IN_A_CHUNK))
]


@pytest.mark.parametrize(("chunk", "part"), PARTS, ids=str)
def test_sequences(chunk, part):
    for number in (chunk * IN_A_CHUNK + place for place in part):
        trial = sequences.trial(number)
        fault = sequences.fault_of(trial)
        assert fault is None, f"{trial}\n{fault}"


def test_the_calls_are_of_all_kinds():
    trials = [sequences.trial(chunk * IN_A_CHUNK + number) for chunk in CHUNKS for number in range(MOST)]
    calls = {call for trial in trials for call in trial.calls}
    assert {call.kind for call in calls} == set(sequences.SHAPES)
    assert len({call.layout for call in calls}) > 8
    for setting in ("completion", "scheduler", "resident", "detect_races"):
        assert len({trial.settings[setting] for trial in trials}) == (3 if setting == "completion" else 2)


SQUARE, TRANSPOSED, LINE = layout(x=2, y=2), layout(0, 2, 1, 3, x=2, y=2), layout(x=4, y=1)
# Pairs of launches that could be mistaken for each other: with other members, or the same members in another order.
PAIRS: dict[str, tuple[tuple[Layout, sequences.Axes], tuple[Layout, sequences.Axes]]] = {
    "axes": ((SQUARE, "y"), (SQUARE, "x")),
    "meshes": ((SQUARE, "x"), (TRANSPOSED, "x")),
    "orders": ((SQUARE, ("x", "y")), (SQUARE, ("y", "x"))),
    "shapes": ((SQUARE, ("x", "y")), (LINE, "x")),
}
SEEDS = 12


def faults_of(pair, kind, *, detect):
    shape = sequences.SHAPES[kind][0]
    first, second = (Call(*group, kind, shape) for group in PAIRS[pair])
    for number in range(SEEDS):
        settings = {
            "completion": ("late", "random", "eager")[number % 3],
            "scheduler": ("pct", "random")[number % 2],
            "detect_races": detect,
            "seed": number,
        }
        fault = sequences.fault_of(Trial(number, (first, first, second, second), settings))
        if fault is not None:
            yield fault


@pytest.fixture
def one_key(monkeypatch):
    """Injects a defect: all launches use the same ready flag."""
    sequences.launch_of.cache_clear()
    monkeypatch.setattr(handshake, "_key", lambda context, group, only: [7, 8, 9, 10])
    yield
    sequences.launch_of.cache_clear()


DETECT = pytest.mark.parametrize("detect", [False, True])


@DETECT
@pytest.mark.parametrize("pair", ["axes", "meshes"])
def test_with_one_key_launches_of_other_members_are_mixed_up(pair, detect, one_key):
    fault = next(faults_of(pair, "pull", detect=detect), "")
    expected = ("ProtocolError", "RaceError") if detect else ("DeadlockError", "wrong numbers", "ProtocolError")
    assert fault.startswith(expected)


@DETECT
@pytest.mark.parametrize("pair", PAIRS)
def test_with_keys_of_their_own_none_is(pair, detect):
    assert list(faults_of(pair, "pull", detect=detect)) == []


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
