"""Changes the PTX of the handshakes or of the proxy fence in one place: the emulator reports it, or it is harmless.

Each change is made to the text on its way into a kernel, so the test runs the changed text. The kernel does little more
than the handshakes: each device gathers all rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.emulation import EmulationError, emulate
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    PeerGroup,
    each_drawn,
    fence_async_proxy,
    semaphore_signal_peer,
    semaphore_wait_peer,
    shared_semaphores,
)
from tests.oracle import make_mesh
from tests.protocol.protocol_cases import change_texts

DEVICES, CTAS, SHARD = 3, 2, (1, 64)
X = np.arange(DEVICES * 64, dtype=np.float32).reshape(DEVICES, 64)


def gather(x_gmem, out_gmem, x_smem, loaded, *, only):
    """Gathers rows, [1, 64] -> [3, 64]: the CTA that draws a peer's number copies that peer's row.

    `only`: the distance of the one peer whose row is copied; None: all rows are.
    """
    (flags,) = shared_semaphores(HANDSHAKE_FLAGS)
    group = PeerGroup("x", (("x", DEVICES),))
    transfers = DEVICES - 1 if only is None else 1
    handshake = Handshake(flags, group, lax.axis_index("cta"), "test", transfers, only)

    def copy(source, owner):
        plgpu.copy_gmem_to_smem(source, x_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(x_smem, out_gmem.at[pl.ds(owner, 1)])
        plgpu.wait_smem_to_gmem(0)

    @plgpu.warp_map
    def _communicate(warp):
        @pl.when(warp == 0)
        def _gather():
            number = handshake.begin()
            handshake.await_peers()

            def pull(item):
                peer = group.peer(item - handshake.looks + (only or 1))
                copy(group.remote_ref(x_gmem, peer), peer)

            _, carried = each_drawn(handshake.counter, number, handshake.items, pull)
            pl.when(lax.axis_index("cta") == 0)(lambda: copy(x_gmem, group.me()))
            fence_async_proxy()
            handshake.leave(carried)


@functools.cache
def operand(mesh):
    return jax.device_put(X, jax.NamedSharding(mesh, P("x")))


def run(seeds, only=None):
    body = functools.partial(gather, only=only)
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((DEVICES, 64), jnp.float32), grid=(CTAS,), grid_names=("cta",),
        scratch_types=[plgpu.SMEM(SHARD, jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
    )  # fmt: skip
    mesh = make_mesh(x=DEVICES)
    mapped = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    for seed in range(seeds):
        with emulate(completion=("eager", "late", "random")[seed % 3], seed=seed, laps=3):
            rows = np.asarray(mapped(operand(mesh))).reshape(DEVICES, DEVICES, 64)
        for me in range(DEVICES):
            there = range(DEVICES) if only is None else [me, (me + only) % DEVICES]
            np.testing.assert_array_equal(rows[me, there], X[there])


# (text to find, replacement)
REPORTED = {
    # The ready flag.
    "raised without a release": (r"fence\.acq_rel\.sys;(\s*@first st)", r"\1"),
    "raised with a release within the GPU": (r"fence\.acq_rel\.sys(;\s*@first st)", r"fence.acq_rel.gpu\1"),
    "raised with an acquire": (r"fence\.acq_rel\.sys(;\s*@first st)", r"fence.acquire.sys\1"),
    "raised with the release behind it": (r"fence\.acq_rel\.sys;((?:\s*@first [^;]*;){4})", r"\1 fence.acq_rel.sys;"),
    "raised within the GPU": (r"st\.relaxed\.sys(\S* \[\$0\+)", r"st.relaxed.gpu\1"),
    "raised by an exchange within the GPU": (r"atom\.relaxed\.sys(\S*cas)", r"atom.relaxed.gpu\1"),
    "raised by plain stores": (r"st\.relaxed\.sys\.(\S* \[\$0\+)", r"st.\1"),
    "raised where it is not zero": (r"(cas\.b32 before, \[\$0\], )0,", r"\g<1>5,"),
    "raised by all lanes": (r"@first (atom\S*cas)", r"\1"),
    "raised one word further": (r"(st\S* \[\$0\+)8\]", r"\g<1>4]"),
    "looked at within the GPU": (r"ld\.relaxed\.sys(\S* word)", r"ld.relaxed.gpu\1"),
    "looked at by plain loads": (r"ld\.relaxed\.sys\.(\S* word)", r"ld.\1"),
    "looked at one word further": (r"(ld\S* word3, \[\$0\+)12\]", r"\g<1>8]"),
    "looked at for any word but the key's": (r"setp\.eq\.u32 there, word0", "setp.ne.u32 there, word0"),
    # A wait for a peer.
    "while it is there": (r"@there bra THERE", "@!there bra THERE"),
    "once": (r"(nanosleep\.u32 40;)", r"bra THERE; \1"),
    "without an acquire": (r"THERE:\s*fence\.acquire\.sys;", "THERE:"),
    "with an acquire within the GPU": (r"THERE:\s*fence\.acquire\.sys", "THERE: fence.acquire.gpu"),
    "with a release": (r"THERE:\s*fence\.acquire\.sys", "THERE: fence.release.sys"),
    "for a number within the GPU": (r"ld\.relaxed\.sys(\S* got)", r"ld.relaxed.gpu\1"),
    "for any number but the expected one": (r"setp\.eq\.u32 there, got", "setp.ne.u32 there, got"),
    # A wait for other CTAs of this device.
    "too long": (r"setp\.ge\.u32 enough", "setp.gt.u32 enough"),
    "not at all": (r"setp\.ge\.u32 enough", "setp.le.u32 enough"),
    "until it is not enough": (r"@!enough", "@enough"),
    "for others, once": (r"@!enough bra LOOK;", ""),
    "for others, without an acquire": (r"fence\.acquire\.gpu;", ""),
    "for others, with a plain load": (r"ld\.relaxed\.gpu", "ld"),
    "for others, without a proxy fence": (r"(fence\.acquire\.gpu;\s*)fence\.proxy\.async\.global;", r"\1"),
    "for others, the proxy fence first": (r"(fence\.acquire\.gpu;)\s*(fence\.proxy\.async\.global;)", r"\2 \1"),
    # Words in which several devices set bits.
    "a bit without a release": (r"red\.release\.sys(\S*or)", r"red.relaxed.sys\1"),
    "a bit within the GPU": (r"red\.release\.sys(\S*or)", r"red.release.gpu\1"),
    "a bit in place of all others": (r"red\.release\.sys\.global\.or", "red.release.sys.global.min"),
    "the first bit for all": (r"shl\.b32 bit, bit, \$1;", ""),
    "a sum without release and acquire": (r"atom\.acq_rel(\S*add)", r"atom.relaxed\1"),
    "a sum without a release": (r"atom\.acq_rel(\S*add)", r"atom.acquire\1"),
    "numbers of which each second is left out": (r"(atom\.relaxed\.gpu\S*add\S* number, \[\$1\], )1", r"\g<1>2"),
    "numbers drawn by each lane": (r"@first (atom\.relaxed\.gpu\S*add)", r"\1"),
    # The fence for the copy engine (async proxy).
    "a fence of aliases": (r"fence\.proxy\.async\.global", "fence.proxy.alias"),
    "a fence of shared memory": (r"fence\.proxy\.async\.global", "fence.proxy.async.shared::cta"),
}  # fmt: skip
# Two checks of the emulator would each find some of these. What the right one says:
WORDS = {
    "raised within the GPU": "at a scope that does not leave it",
    "a bit within the GPU": "stays on its device",
    "looked at within the GPU": "an access of scope 'gpu' to .* meets a value that device",
    "raised by plain stores": "is not ordered|plain access",
}
# Changes that the emulator must not report. The key of each says why the changed program is still correct.
HARMLESS = {
    "only keys are ever in these words here: the three others are for what memory may hold by chance": (
        r"setp\.eq\.and\.u32 there, word[123][^;]*;", "",
    ),
    "who has looked signals through the generic proxy; the copies come behind the count's own fence": (
        r"(THERE:\s*fence\.acquire\.sys;)\s*fence\.proxy\.async\.global;", r"\1",
    ),
    "who counts to the last number can only see that one and smaller ones": (
        r"setp\.ge\.u32 enough", "setp.eq.u32 enough",
    ),
    "a larger scope": (r"ld\.relaxed\.gpu", "ld.relaxed.sys"),
    "a sequentially consistent fence is more": (r"fence\.acq_rel\.sys(;\s*@first st)", r"fence.sc.sys\1"),
    "before it begins, a device has read nothing that it would have to acquire": (
        r"fence\.acq_rel\.sys(;\s*@first st)", r"fence.release.sys\1",
    ),
    "what the sum reads is acquired by the fence of the wait behind it, before the device speaks": (
        r"atom\.acq_rel(\S*add)", r"atom.release\1",
    ),
    "each bit is set once": (r"red\.release\.sys\.global\.or", "red.release.sys.global.xor"),
    "a bit that all lanes set is set": (r"@first red\.release\.sys\.global\.or", "red.release.sys.global.or"),
    "without a pause": (r"nanosleep\.u32 40;", ""),
}  # fmt: skip


def test_clean():
    run(8)


@pytest.mark.parametrize("only", [1, 2])
def test_one_peer_is_enough(only):
    """Another peer, or the same one, looks for this device."""
    run(6, only)


def test_a_wait_for_a_peer_ends_at_a_greater_value():
    def body(out):
        (flags,), group = shared_semaphores((1,)), PeerGroup("x", (("x", 2),))

        @plgpu.warp_map
        def _signal(warp):
            @pl.when(warp == 0)
            def _():
                semaphore_signal_peer(flags.at[0], group, group.peer(1), 2)
                semaphore_wait_peer(flags.at[0], 1, group, group.peer(1))

        out[0] = jnp.int32(1)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))
    mapped = jax.shard_map(kernel, mesh=make_mesh(x=2), in_specs=(), out_specs=P("x"), check_vma=False)
    with emulate():
        np.testing.assert_array_equal(jax.jit(mapped)(), 1)


@pytest.mark.parametrize(
    "which",
    [pytest.param(k, marks=pytest.mark.slow if n % 2 and k not in WORDS else []) for n, k in enumerate(REPORTED)],
)
def test_a_wrong_text_is_reported(which, monkeypatch):
    changes = change_texts(monkeypatch, *REPORTED[which])
    with pytest.raises(EmulationError, match=WORDS.get(which)):
        run(8)
    assert any(changes), "the handshakes have no such text any more"


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=pytest.mark.slow if n % 3 else []) for n, name in enumerate(HARMLESS)]
)
def test_a_harmless_text(which, monkeypatch):
    changes = change_texts(monkeypatch, *HARMLESS[which])
    run(2)
    assert any(changes), "the handshakes have no such text any more"
