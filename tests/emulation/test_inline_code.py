"""Tests inline PTX in the emulator: its results, the memory order it gives, its waits, and the PTX that is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from mosaic_emulator.execution import registers
from mosaic_emulator.foundations import ptx
from tests.emulation.cases import out_type
from tests.emulation.inline_cases import WAIT, inline, on_words

PROLOGUE = "{ .reg .b32 r<4>; .reg .b64 w<3>; .reg .pred p, q; mov.u32 r0, 7; mov.u32 r1, 0xfffffffe; "
SUMS = {
    "add.u32 $0, r0, r1;": 5,
    "sub.s32 $0, r0, 9;": -2,
    "mul.lo.u32 $0, r0, r1;": -14,
    "mad.lo.u32 $0, r0, 3, r0;": 28,
    "mad.wide.u32 w0, r1, 2, 5; shr.u64 w0, w0, 32; cvt.u32.u64 $0, w0;": 2 * 0xFFFFFFFE + 5 >> 32,
    "cvt.s64.s32 w0, r1; shr.s64 w0, w0, 40; cvt.u32.u64 $0, w0;": -1,
    "cvt.u64.u32 w0, r1; shr.u64 w0, w0, 31; cvt.u32.u64 $0, w0;": 1,
    "and.b32 $0, r1, 0xf;": 14,
    "xor.b32 r2, r0, 2; or.b32 $0, r2, 8;": 13,
    "not.b32 $0, r0;": -8,
    "shl.b32 $0, r0, 30;": 0xC0000000 - (1 << 32),
    "shr.s32 $0, r1, 1;": -1,
    "shr.u32 $0, r1, 28;": 15,
    "min.s32 $0, r0, r1;": -2,
    "min.u32 $0, r0, r1;": 7,
    "max.u32 $0, r0, r1;": -2,
    "setp.lt.s32 p, r1, r0; selp.b32 $0, 1, 2, p;": 1,
    "setp.lt.u32 p, r1, r0; selp.b32 $0, 1, 2, p;": 2,
    "setp.hi.u32 p|q, r1, r0; selp.b32 $0, 1, 2, q;": 2,
    "setp.eq.u32 p, r0, 7; setp.gt.and.u32 q, r0, 7, p; setp.eq.or.u32 q, r0, 8, !q; selp.b32 $0, 1, 2, q;": 1,
    "setp.ne.u32 p, r0, 7; setp.eq.xor.u32 q, r0, 7, p; and.pred q, q, !p; selp.b32 $0, 1, 2, q;": 1,
    "mov.u32 $0, 0; mov.u32 r2, 0; UP: add.u32 $0, $0, r2; add.u32 r2, r2, 1; setp.le.u32 p, r2, 4; @p bra UP;": 10,
    "mov.u32 $0, 1; bra END; mov.u32 $0, 2; { bra END; END: } END:": 1,
    "setp.eq.u32 p, r0, 7; mov.u32 $0, 1; @!p mov.u32 $0, 2; @p add.u32 $0, $0, 2; /* } */ // }\n": 3,
    "mov.u64 w0, %globaltimer; cvt.u32.u64 $0, w0; add.u32 $0, $0, %laneid;": 0,
}


def test_arithmetic():
    """One kernel computes all cases of `SUMS`."""

    def act(words, out):
        for index, text in enumerate(SUMS):
            out[index] = inline(PROLOGUE + text + " }", dtype=jnp.int32)

    found = dict(zip(SUMS, on_words(act, results=len(SUMS))))
    assert found == SUMS


def test_scalar_arguments_results_and_the_operations_around_the_text():
    def code(_, x, y):
        low, high = mgpu_utils.inline_ptx(
            "add.u32 $0, $2, $3; sub.u32 $1, $2, $3;", x.registers.item(), y.registers.item(),
            result_types=[x.mlir_dtype, x.mlir_dtype], has_side_effects=True,
        )  # fmt: skip
        both = [mgpu.FragmentedArray.splat(value, (), is_signed=True) for value in (low, high)]
        return both[0] * 10 + 1, both[1]

    def act(words, out):
        splat = plgpu.Layout.WG_SPLAT
        returns = (plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat),) * 2
        call = plgpu.inline_mgpu(arg_types=(splat, splat), return_type=returns)(code)
        out[0], out[1] = call(jnp.int32(4) + lax.axis_index("cta"), jnp.int32(-6))

    assert on_words(act, results=2) == [-19, 10]


def test_atomic_operations_and_wide_accesses():
    def act(words, out):
        one = "@$1 {}.relaxed.gpu.global.{}.{} [$0], {};".format
        for operation, kind, value in (("add", "u32", 5), ("max", "s32", -1), ("max", "u32", 9), ("or", "b32", 6)):
            inline(one("red", operation, kind, value), words.at[0], elect=True)  # The word becomes 5, 5, 9, 15.
        operations = "cas.b32", "inc.u32", "exch.b32", "inc.u32", "inc.u32", "inc.u32"
        for index, (operation, values) in enumerate(zip(operations, ("15, 4", "4", "77", "78", "60", "60"))):
            text = f"@$2 atom.acq_rel.sys.global.{operation} $0, [$1], {values};"
            out[index] = inline(text, words.at[0], elect=True, dtype=jnp.int32)
        inline("st.release.sys.global.b64 [$0+8], 0x500000006;", words)
        inline("red.relaxed.gpu.global.add.u32 [$0], 2;", words.at[2])  # by all 128 threads
        out[6] = inline("ld.acquire.gpu.global.u32 $0, [$1+-4];", words.at[3], dtype=jnp.int32)
        out[7] = inline(
            "{.reg .b64 both; ld.relaxed.sys.global.u64 both, [$1]; shr.u64 both, both, 32; cvt.u32.u64 $0, both;}",
            words.at[2], dtype=jnp.int32,
        )  # fmt: skip
        plgpu.semaphore_wait(words.at[0], 1)
        out[8] = pl.semaphore_read(words.at[0])

    # `inc` wraps to zero at its limit, and beyond.
    assert on_words(act, results=9) == [15, 4, 0, 77, 78, 0, 262, 5, 0]


def test_a_lock_of_compare_and_swap():
    """Four CTAs add to one plain word, one after the other. No race is reported, and each CTA sees the previous sum."""
    lock = """{
        .reg .pred free; .reg .b32 was;
    TRY:
        @$2 atom.{order}.gpu.global.cas.b32 was, [$1], 0, 1;
        setp.eq.u32 free, was, 0;
        @!free bra TRY;
        mov.u32 $0, was;
    }"""

    def run(order, seed=0):
        def act(words, out):
            got = inline(lock.replace("{order}", order), words.at[0], elect=True, dtype=jnp.int32)
            out[0] = jnp.where(lax.axis_index("cta") == 0, 1 + got, 2 + got)
            inline("@$1 st.release.gpu.global.b32 [$0], 0;", words.at[0], elect=True)

        return on_words(act, ctas=4, seed=seed)

    for seed in range(2):
        run("acquire", seed)
    with pytest.raises(RaceError, match="race on output 0"):
        run("relaxed")


@pytest.mark.parametrize("fence", ["acq_rel", "sc"])
def test_who_stores_before_it_looks_needs_sequential_consistency(fence):
    def body(out):
        words, cta = pl.get_global(plgpu.SemaphoreType.REGULAR((4,))), lax.axis_index("cta")
        inline(f"@$1 st.relaxed.gpu.global.b32 [$0], 1; fence.{fence}.gpu;", words.at[cta], elect=True)
        out[cta] = inline("ld.relaxed.gpu.global.b32 $0, [$1];", words.at[1 - cta], dtype=jnp.int32)

    kernel = jax.jit(plgpu.kernel(body, out_type=out_type((2,), jnp.int32), grid=(2,), grid_names=("cta",)))
    found = set()
    for seed in range(24):
        with emulate(seed=seed, scheduler="random"):
            found.add(tuple(np.asarray(kernel()).tolist()))
    assert found >= {(0, 1), (1, 0)} and ((0, 0) in found) == (fence == "acq_rel")


# ---- order: one-line mutants of a message (more: tests/protocol/test_handshake_texts.py) -----------------------------

SEND = "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$0], 3;"
# The changed text, what is replaced, by what; the fault, and words of the report.
MUTANTS = [
    (SEND, "fence.acq_rel.gpu; ", "", RaceError, "race on output 0"),
    (SEND, "st.relaxed.gpu", "st", RaceError, "is not ordered"),
    (SEND, " 3;", " 2;", DeadlockError, r"semaphore\[0\] of device 0, got 2 \(setp.ge.u32 .* 3\)"),
    (SEND, "[$0]", "[$0+4]", DeadlockError, r"polls semaphore\[0\] of device 0, got 0"),
    (SEND, "[$0]", "[$0+16]", ProtocolError, "bytes 16 to 20 are out of bounds for semaphore"),
    (WAIT, "setp.ge", "setp.gt", DeadlockError, r"got 3 \(setp.gt.u32 enough, number, 3\)"),
    (WAIT, "ld.relaxed.gpu", "ld", RaceError, "is a plain access"),
    (WAIT, "fence.acquire.gpu;", "", RaceError, "race on output 0"),
    (WAIT, "@!enough bra LOOK;", "", RaceError, "race on output 0"),
]


def message(send, wait):
    """CTA 1 writes a number and then a word; CTA 0 waits for the word and reads the number."""

    def act(words, out):
        @pl.when(lax.axis_index("cta") == 1)
        def _send():
            out[1] = jnp.int32(5)
            inline(send, words.at[0])

        @pl.when(lax.axis_index("cta") == 0)
        def _receive():
            inline(wait, words.at[0])
            out[0] = out[1]

    return on_words(act, ctas=2, results=2)


def test_a_message_and_its_mutants():
    assert message(SEND, WAIT) == [5, 5]
    for text, old, new, fault, words in MUTANTS:
        assert text.count(old) == 1
        with pytest.raises(fault, match=f"(?s){words}"):
            message(*(each.replace(old, new) if each is text else each for each in (SEND, WAIT)))


# ---- waits -----------------------------------------------------------------------------------------------------------


def test_a_wait_is_content_with_the_first_number_that_ends_it():
    """A wait for 2 signals may see 3. The thread must still not rely on the data behind the third signal."""

    def run(count, seed):
        def act(words, out):
            cta = lax.axis_index("cta")

            @pl.when(cta > 0)
            def _signal():
                out[cta] = cta
                plgpu.semaphore_signal(words.at[0], memory_scope="gpu")

            @pl.when(cta == 0)
            def _wait():
                inline(WAIT.replace(", 3;", f", {count};"), words.at[0])
                out[0] = out[1] + out[2] + out[3]

        return on_words(act, ctas=4, results=4, seed=seed)

    for seed in range(3):
        assert run(3, seed) == [6, 1, 2, 3]
        with pytest.raises(RaceError, match="race on output 0"):
            run(2, seed)


POLL = "{ .reg .pred p; .reg .b32 n, tries; mov.u32 tries, 0; LOOK: ld.relaxed.gpu.global.b32 n, [$1]; "


def test_a_loop_that_looks_at_several_words_and_counts_is_a_wait():
    text = (
        POLL
        + """
        add.u32 tries, tries, 1; nanosleep.u32 40;
        setp.ne.u32 p, n, 0; @p bra END; ld.relaxed.gpu.global.b32 n, [$1+4]; setp.eq.u32 p, n, 0; @p bra LOOK;
        END: mov.u32 $0, tries; }"""
    )

    def act(words, out, who=1):
        cta = lax.axis_index("cta")
        pl.when(cta == 1)(lambda: plgpu.semaphore_signal(words.at[who]))
        pl.when(cta == 0)(lambda: out.__setitem__(0, inline(text, words.at[0], dtype=jnp.int32)))

    assert 1 <= on_words(act, ctas=2)[0] < 8
    with pytest.raises(
        DeadlockError, match=r"polls semaphore\[0\] of device 0, got 0, semaphore\[1\] .*nline_cases.py"
    ):
        on_words(lambda words, out: act(words, out, who=2), ctas=2)


def test_time_stands_still_unless_there_is_a_clock(monkeypatch):
    text = (
        POLL
        + """
        setp.ne.u32 p, n, 0; @p bra END;
        { .reg .b64 now; mov.u64 now, %globaltimer; setp.lt.u64 p, now, 1000; @p bra LOOK; trap; }
        END: mov.u32 $0, n; }"""
    )

    def act(words, out):
        out[0] = inline(text, words.at[0], dtype=jnp.int32)

    with pytest.raises(DeadlockError, match=r"polls semaphore\[0\]"):
        on_words(act)
    clock = itertools.count(step=10)
    monkeypatch.setattr(registers, "CLOCK", lambda thread: next(clock))
    with pytest.raises(ProtocolError, match="the kernel trapped: trap"):
        on_words(act)


# ---- what cannot be read ---------------------------------------------------------------------------------------------

UNREADABLE = {
    "bar.sync 0;": r"inline_cases.py:\d+.*the function .* cannot be emulated: 'bar.sync 0' is not emulated",
    "st.relaxed.cta.shared.b32 [$0], 0;": ".shared in 'st.relaxed.cta.shared.b32",
    "st.relaxed.global.b32 [$0], 0;": "names no scope",
    "st.relaxed.cluster.global.b32 [$0], 0;": ".cluster in",
    "{ .reg .f32 f; add.f32 f, f, f; }": "the type .f32 is not emulated",
    "red.relaxed.gpu.global.add.noftz.f16x2 [$0], 0;": "is not emulated",
    "mov.u32 r, 0;": "'r' in 'mov.u32 r, 0' is no register",
    "bra AWAY;": "no label for 'bra AWAY'",
    "st.relaxed.gpu.global.b32 [$1], 0;": r"names the operand \$1, and there are 1",
    "fence.acq_rel.cluster;": "is not emulated",
    "mov.u32 $0": "a `;` is missing",
    "{ .reg .b32 r; mov.u32 r, %smid; }": "%smid is not emulated",
    "{ .reg .b32 r; mov.u32 r; }": "other operands than expected",
}


WRONG = {
    "{ .reg .b32 r; st.relaxed.gpu.global.b32 [$0], r; }": "the register r is read before anything has been written",
    "st.relaxed.gpu.global.b64 [$0+4], 0;": "byte 4 of semaphore is no address for 8 bytes",
    "ld.relaxed.gpu.global.b32 _, [$0+-4];": "out of bounds",
    "st.shared.b32 [$0], 0;": "a plain access of inline PTX to semaphore of device 0 as smem is not emulated",
    "trap;": "the kernel trapped",
    "{ .reg .b32 r; atom.relaxed.gpu.global.add.u32 r, [$0], 1; }": "runs in 128 threads at once",
}


@pytest.mark.parametrize("text", UNREADABLE | WRONG)
def test_what_cannot_be_read_or_goes_wrong_is_an_error_with_the_line(text):
    error = NotImplementedError if text in UNREADABLE else EmulationError
    with pytest.raises(error, match=(UNREADABLE | WRONG)[text]):
        on_words(lambda words, out: inline(text, words.at[0]))


def test_plain_stores_to_ordinary_buffers():
    def act(words, out):
        inline("{ .reg .b64 w; mov.u64 w, 0x200000001; st.global.b64 [$0+8], w; st.global.b32 [$0+4], 7; }", out)
        inline("st.global.b32 [$0], 9;", out.at[0])

    assert on_words(act, results=4) == [9, 7, 1, 2]
    with pytest.raises(RaceError, match=r"race on output 0:\n.*bytes 0 to 4"):  # Two CTAs store to one place.
        on_words(lambda words, out: inline("st.global.b32 [$0], 1;", out), ctas=2)
    for text, said in (
        ("st.global.b64 [$0+4], 0;", "byte 4 of output 0 is no address for 8 bytes"),
        ("st.global.b32 [$0+16], 0;", "bytes 16 to 20 are out of bounds for output 0 of device 0, which has 16"),
        ("st.global.b32 [$0+-4], 0;", "bytes -4 to 0 are out of bounds"),
    ):
        with pytest.raises(ProtocolError, match=said):
            on_words(lambda words, out, text=text: inline(text, out), results=4)


def test_plain_accesses_to_shared_memory():
    text = """{ .reg .b32 n; ld.shared.b32 n, [$1+4]; add.u32 n, n, 1; st.shared.b32 [$1+4], n;
        st.global.b32 [$0], n; }"""

    def counted(words, out, unwritten=False):
        def run(smem):
            if not unwritten:
                inline("st.shared.b32 [$0+4], 5;", smem)
            inline(text, out, smem)
            out[1] = smem[1]

        pl.run_scoped(run, plgpu.SMEM((4,), jnp.int32))

    assert on_words(counted, results=2) == [6, 6]
    with pytest.raises(EmulationError, match="memory that nobody has written"):
        on_words(lambda words, out: counted(words, out, unwritten=True), results=2)


def test_ordinary_buffers_and_other_functions_and_arrays():
    def asks(context, ref):
        context.device_id()

    def meets(_):
        mgpu_utils.warpgroup_barrier()

    layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
    for error, words, act in (
        (EmulationError, "inline PTX on output 0, which is no array of semaphores",
         lambda words, out: inline("st.relaxed.gpu.global.b32 [$0], 1;", out)),
        (NotImplementedError, "asks cannot be emulated: it asks the launch context for `device_id`",
         lambda words, out: plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(asks)(words.at[0])),
        (NotImplementedError, "meets cannot be emulated", lambda words, out: plgpu.inline_mgpu()(meets)()),
        (NotImplementedError, r"an array of shape \(128,\), and only scalars",
         lambda words, out: plgpu.inline_mgpu(arg_types=(layout,))(lambda _, x: None)(jnp.zeros(128, np.int32))),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            on_words(act)


def test_what_is_no_ptx():
    for text in ("add.u32 a, a, 1", "} add.u32 a;", "{ .reg .b32 a, a; }", "{ A: A: }", "1 + 1;", ".reg a;"):
        with pytest.raises(ptx.PtxError):
            ptx.parse(text)
