"""Waits that take long: the record that the host reads, the end of the kernel, and what is written of them.

Also how many meshes can learn their peers' addresses, and whose memory peers cannot see.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator.execution import registers
from overlap import _settings
from overlap.emulation import EmulationError, ProtocolError, emulate
from overlap.primitives import PeerGroup, semaphore_signal, stalls, windows
from overlap.primitives.waits import wait_for_word
from tests.protocol.protocol_cases import change_texts

LIMIT_S = 50
FIELDS = [stalls.OPERATION, stalls.POSITION, stalls.PEER, stalls.ROLE, stalls.EXPECTED, stalls.GOT, stalls.WAITED]


def read_record(state, out, words):
    """Looks at both records until this is the greater state, then reads the fields of the one that has been written.

    As the host does. The fields are read by plain loads: a race, unless they are released before the state is written.
    """
    one, two = stalls.RECORD_BYTES, 3 * stalls.RECORD_BYTES
    fields = (f"ld.global.b32 field, [at+{4 * f}]; st.global.b32 [$0+{4 * i}], field;" for i, f in enumerate(FIELDS))
    text = f"""{{ .reg .pred other; .reg .b32 a, b, field; .reg .b64 at;
        LOOK: ld.relaxed.sys.global.b32 a, [$1+{one}]; ld.relaxed.sys.global.b32 b, [$1+{two}];
        max.u32 field, a, b; setp.ne.u32 other, field, {state}; @other bra LOOK; fence.acquire.sys;
        ld.relaxed.sys.global.b32 a, [$1+{one + 4 * stalls.OPERATION}]; setp.eq.u32 other, a, 0;
        selp.b32 a, {two}, {one}, other; mad.wide.u32 at, a, 1, $1; {"".join(fields)}
        mov.u32 field, %clock; }}"""

    def emit(_, *refs):
        mgpu_utils.inline_ptx(text, *map(mgpu_utils.memref_ptr, refs), has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(emit)(out, words.at[0])


def wait_long(patch, state, seen):
    """Waits for a word that is raised once the host has seen a record in this state; after `GIVEN_UP`, never.

    The records lie behind the word, in the same array. A look takes a second. `seen` becomes non-empty when the host
    has seen such a record. Returns what the host has read in this state, and in the state `OVER`: `FIELDS` each.
    """
    group, seconds = PeerGroup("x", (("x", 2),)), itertools.count(10**6)

    def clock(thread):
        seen.extend([True] * (thread.cta.index == 1))  # The host asks for the time when it has read a record.
        return next(seconds) * 10**9

    def act(words, out):
        @plgpu.warp_map
        def _roles(warp):
            is_host = lax.axis_index("cta") == 1
            wait = lambda: wait_for_word(words.at[0], 3, group, 1, operation=7, role=stalls.FLAG)  # noqa: E731
            pl.when((warp == 0) & ~is_host)(wait)

            @pl.when((warp == 0) & is_host)
            def _host():
                read_record(state, out.at[0], words)
                if state != stalls.GIVEN_UP:
                    semaphore_signal(words.at[0], 3)
                    read_record(stalls.OVER, out.at[1], words)

    patch.setattr(stalls, "address", lambda: "$0")
    patch.setattr(stalls, "MOST_DEVICES", 2)
    patch.setattr(_settings, "wait_timeout_s", lambda: LIMIT_S)
    patch.setattr(registers, "CLOCK", clock)
    patch.setattr(PeerGroup, "me", lambda self: 0)
    words = plgpu.SemaphoreType.REGULAR((stalls.RECORD_BYTES,))
    out_type = jax.ShapeDtypeStruct((2, len(FIELDS)), jnp.int32)
    kernel = plgpu.kernel(lambda out: act(pl.get_global(words), out), out_type=out_type, grid=(2,), grid_names=("cta",))
    with emulate(step_limit=20_000):
        return np.asarray(jax.jit(kernel)()).tolist()


def check_long_waits(patch):
    seen = []
    (*waiting, ticks), (*over, _) = wait_long(patch, stalls.STILL_WAITING, [])
    assert waiting == [7, 0, 1, stalls.FLAG, 3, 0] and over == [*waiting[:-1], 3]
    assert stalls.REPORT_AFTER_S <= ticks * stalls.TICK_S < stalls.REPORT_AFTER_S + 3
    with pytest.raises(ProtocolError, match="the kernel trapped"):
        wait_long(patch, stalls.GIVEN_UP, seen)
    assert seen


def test_a_long_wait_is_reported_and_ends(monkeypatch):
    check_long_waits(monkeypatch)


LONG = {
    "a record without a release": (r"fence\.acq_rel\.sys;(\s*@lane_0 st\S* \[record\+0\])", r"\1"),
    "a state before the fields": (
        r"(@lane_0 st[^;]*record\+4\][^;]*;)([^A-Z]*)(@lane_0 st\S* \[record\+0\], \d;)", r"\3\2\1"
    ),
    "a report at once": (r"@early bra LOOK;", ""),
    "a report at each look": (r"mov\.b32 until, \d+;(\s*bra LOOK;)", r"\1"),
    "time since the clock began": (r"@early mov\.b32 since, clock;", ""),
    "no end": (r"@early bra GIVE_UP;", ""),
    "no time to read": (r"@early bra LINGER;", ""),
    "no trap": (r"trap;", "bra LOOK;"),
    "over, unsaid": (r"(\[record\+0\], )0;", r"\g<1>1;"),
}  # fmt: skip


@pytest.mark.parametrize("which", LONG)
def test_a_wrong_text_of_a_long_wait_shows(which, monkeypatch):
    changes = change_texts(monkeypatch, *LONG[which])
    with pytest.raises((EmulationError, AssertionError, pytest.fail.Exception)):
        check_long_waits(monkeypatch)
    assert any(changes), "the wait has no such text any more"


# --- What is written of a wait ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "seen"), [(0, "nothing"), (1, "that of an operation which has ended"), (77, "other contents")]
)
def test_the_report_of_a_wait_shows_that_orders_differ(got, seen, monkeypatch):
    """Two processes of a job, each with a device that waits for the other one to begin, in different operations."""
    group = types.SimpleNamespace(places=("x",), axis_name="x", size=2)
    store = types.SimpleNamespace(texts={})
    store.key_value_set = lambda key, text, allow_overwrite: store.texts.update({key: text})
    store.key_value_dir_get = lambda folder: store.texts.items()
    monkeypatch.setattr(stalls._compat, "job_store", lambda: store)
    waits, records = [], []
    for process, operation in enumerate(("gather 8x8x8", "scatter 8x8x8")):
        record = np.zeros(stalls.RECORD_BYTES // 4, np.uint32)
        fields = [*FIELDS[:3], stalls.STATE, *FIELDS[3:6]]
        record[fields] = (
            stalls.describe(operation, group), process, 1 - process, stalls.STILL_WAITING, stalls.BEGUN, 0xABCDEF01,
            got,
        )  # fmt: skip
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        waits = stalls._exchanged([f"{stalls._who(record)} waits for {stalls._for_whom(record)}"])
        records.append(record)
    assert len(waits) == 2
    assert f"shows {got:#x} ({seen})" in stalls.line(records[1]) and "0xabcdef01" in stalls.line(records[1])
    elsewhere = stalls._elsewhere(waits[1], waits)
    assert "gather 8x8x8 along 'x' of 2 devices: position 0 (GPU ?, process 0) waits for position 1" in elsewhere
    assert "scatter" not in elsewhere and elsewhere.endswith("the same operations in the same order")
    record[[stalls.ROLE, stalls.EXPECTED, stalls.GOT]] = stalls.DONE, 0b1111, 0b0101
    stalls._described[record[stalls.OPERATION]] = ("scatter 8x8x8", 4)
    assert "for positions 1, 3" in stalls.line(record)
    # A device that waits in the same operation is no sign of different orders.
    assert "order" not in stalls._elsewhere(waits[1], [waits[1], waits[1].replace("position 1 (", "position 5 (")])


# --- Peers' addresses, with one process per GPU -----------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "meshes"), [(2, 45), (4, 22), (8, 11)])
def test_address_space_is_enough_for_some_meshes_and_the_one_too_many_is_refused(monkeypatch, gpus, meshes):
    monkeypatch.setattr(windows, "_meshes", set())
    monkeypatch.setenv("NCCL_WIN_STRIDE", str(windows.STRIDE_BYTES))
    for mesh in [*range(meshes), *range(meshes)]:
        windows.note_mesh(tuple(range(mesh, mesh + gpus)))
    with pytest.raises(NotImplementedError, match=rf"{meshes + 1} meshes of different devices.* 9\d TB.*smaller"):
        windows.note_mesh((-1, *range(1, gpus)))


def test_an_allocator_whose_memory_peers_do_not_see_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(NotImplementedError, match=r"XLA_PYTHON_CLIENT_ALLOCATOR=platform .* cuda_async"):
        windows.require_shared_memory()
