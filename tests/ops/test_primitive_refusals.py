"""Mistakes in users' own kernels made of `overlap.primitives`: each is refused, and the message says what to do."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap import primitives as prim
from overlap.emulation import DeadlockError, ProtocolError, emulate
from tests import oracle
from tests.ops.primitive_cases import KERNELS

WHOLE = P()
ROWS = jax.ShapeDtypeStruct((8, 128), jnp.float32)
GATHER = KERNELS["all_gather"][0]


def on_mesh(function, mesh, *, in_specs=WHOLE, out_specs=WHOLE, **keywords):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **keywords)
    )


def mapped(body, *, devices=1, scratch=()):
    """A kernel without operands, with one result, in one CTA on each device."""
    kernel = plgpu.kernel(body, out_type=ROWS, scratch_types=scratch)
    return on_mesh(lambda: kernel(), oracle.make_mesh(x=devices), out_specs=P("x"))


def run(body, **options):
    with emulate():
        jax.block_until_ready(mapped(body, **options)())


def in_one_warp(act):
    @plgpu.warp_map
    def _warps(warp):
        @pl.when(warp == 0)
        def _one():
            act()
            prim.converge_warp()


# ---- `jax.vmap` ------------------------------------------------------------------------------------------------------

BATCH = np.arange(3 * 8 * 128, dtype=np.float32).reshape(3, 8, 128)
WAYS_OUT = r"`jax.lax.map`.*`jax.custom_batching.sequential_vmap`"


def test_vmap_is_refused_unless_there_is_nothing_shared():
    for kernel, _ in KERNELS.values():
        twice = jax.vmap(jax.vmap(lambda x, kernel=kernel: kernel(x)))
        with pytest.raises(NotImplementedError, match=f"`shared_semaphores`.*`jax.vmap` maps.*{WAYS_OUT}"), emulate():
            on_mesh(twice, oracle.make_mesh(x=2), out_specs=P(None))(BATCH[:, None])

    def signals(x, out):
        plgpu.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR))
        out[...] = x[...]

    def doubles(x, out):
        out[...] = 2 * x[...]

    with pytest.raises(NotImplementedError, match=f"kernel .*`jax.vmap` of a kernel.*{WAYS_OUT}"), emulate():
        jax.jit(jax.vmap(plgpu.kernel(signals, out_type=ROWS)))(BATCH)
    with emulate():
        np.testing.assert_array_equal(jax.jit(jax.vmap(plgpu.kernel(doubles, out_type=ROWS)))(BATCH), 2 * BATCH)


def test_the_ways_out_of_vmap():
    ways = lambda x: lax.map(GATHER, x), jax.vmap(jax.custom_batching.sequential_vmap(lambda x: GATHER(x)))
    for way in ways:
        with emulate(cores=2, seed=1):
            got = on_mesh(way, oracle.make_mesh(x=2), in_specs=P(None, "x"))(BATCH)
        np.testing.assert_array_equal(np.asarray(got), BATCH)


# ---- arguments -------------------------------------------------------------------------------------------------------

P_: Any = prim  # The arguments below have wrong types.
WRONG = [  # Of one semaphore and the group of two devices; the message names these words.
    (lambda f, g: P_.semaphore_wait(f, "1"), TypeError, "`value` of `semaphore_wait`.*'1' (str)"),
    (lambda f, g: P_.semaphore_wait(f, True), TypeError, "`value` of `semaphore_wait`.*True (bool)"),
    (lambda f, g: P_.semaphore_wait(f, jnp.float32(1)), TypeError, "`value`.*float32 and shape ()"),
    (lambda f, g: P_.semaphore_wait(f, -1), ValueError, "`value`.*at least 0 and.*got -1"),
    (lambda f, g: P_.semaphore_wait(f, 1 << 31), ValueError, "`value`.*less than 2³¹, got 2147483648"),
    (lambda f, g: P_.semaphore_signal(f, 1.5), TypeError, "`increment` of `semaphore_signal`.*1.5"),
    (lambda f, g: P_.semaphore_signal(f, g.me()), TypeError, "`increment`.*int32.*by a constant"),
    (lambda f, g: P_.semaphore_signal(f, 0), ValueError, "`increment`.*at least 1, got 0"),
    (lambda f, g: P_.semaphore_signal(3), TypeError, "`flag` of `semaphore_signal` must be one semaphore"),
    (lambda f, g: P_.semaphore_signal_peer(f, g, None), TypeError,
     "`position` of `semaphore_signal_peer` must be a position in the group.*got None"),
    (lambda f, g: P_.semaphore_signal_peer(f, g, 2), ValueError, "`position`.*in 0 … 1, got 2"),
    (lambda f, g: P_.semaphore_signal_peer(f, g, 1, "2"), TypeError, "`increment`.*'2'"),
    (lambda f, g: P_.semaphore_signal_peer(f, "x", 1), TypeError, "`group` of `semaphore_signal_peer`.*'x'"),
    (lambda f, g: P_.semaphore_wait_peer(f, "1", g, 1), TypeError, "`value` of `semaphore_wait_peer`"),
    (lambda f, g: P_.semaphore_wait_peer(f, 1, 2, 1), TypeError, "`group` of `semaphore_wait_peer`.*2: take"),
    (lambda f, g: g.remote_ref(f, 1.0), TypeError, "`position` of `PeerGroup.remote_ref`.*1.0"),
    (lambda f, g: g.remote_ref(jnp.ones(8), 1), TypeError, "`ref` of `PeerGroup.remote_ref` must be a ref"),
    (lambda f, g: g.device_id(None), TypeError, "`position` of `PeerGroup.device_id`.*None"),
    (lambda f, g: g.peer(3), ValueError, "`distance` of `PeerGroup.peer`.*in 0 … 2, got 3"),
    (lambda f, g: P_.draw(f, g.me()), TypeError, "`end` of `draw` must be a Python int.*int32"),
    (lambda f, g: P_.draw(3, 2), TypeError, "`counter` of `draw` must be one semaphore.*got 3 (int)"),
    (lambda f, g: P_.each_drawn(f, 0, -1, print), ValueError, "`end` of `each_drawn`.*at least 0, got -1"),
    (lambda f, g: P_.Handshake(f, g, 0, "of mine"), TypeError, "`flags` of `Handshake`.*got shape ()"),
    (lambda f, g: P_.Handshake(jnp.zeros(prim.HANDSHAKE_FLAGS), g, 0, "of mine"), TypeError,
     "`flags` of `Handshake`.*got an array of float32"),
    (lambda f, g: P_.Handshake(f, "x", 0, "of mine"), TypeError,
     "`group` of `Handshake` must be a PeerGroup, got 'x': take `PeerGroup.of(axis_name)`"),
]  # fmt: skip


def spelled(words):
    """Returns the regular expression of `words`, in which only `.*` is special."""
    return ".*".join(map(re.escape, words.split(".*")))


SEVERAL = [  # Of four semaphores, where one is wanted.
    (lambda f, g: prim.draw(f, 2), TypeError, "`counter` of `draw` must be one semaphore, got shape (4,)"),
    (lambda f, g: prim.each_drawn(f, 0, 2, print), TypeError, "`counter` of `draw` must be one semaphore"),
    (lambda f, g: prim.semaphore_wait_peer(f, 1, g, 1), TypeError, "`flag` of `semaphore_wait_peer` must be"),
]


def test_wrong_arguments():
    """All in one kernel, since each is refused while the kernel is traced."""

    def body(out):
        flags, group = prim.shared_semaphores((4,))[0], prim.PeerGroup.of("x")

        def act():
            prim.semaphore_signal(flags.at[0], np.int64(2))  # An integer of NumPy is one.
            prim.semaphore_wait(flags.at[0], np.int32(2))
            for given, rows in ((flags.at[0], WRONG), (flags, SEVERAL)):
                for call, error, words in rows:
                    with pytest.raises(error, match=spelled(words)):
                        call(given, group)

        in_one_warp(act)

    jax.eval_shape(mapped(body, devices=2))


LOAD, STORE = prim.tma_load, prim.tma_store
WRONG_COPIES = [
    (lambda x, tile, b: LOAD(x[...], tile, b), "`source_gmem` of `tma_load`.*an array of float32.*references"),
    (lambda x, tile, b: LOAD(x, tile[...], b), "`tile_smem` of `tma_load`.*an array of float32"),
    (lambda x, tile, b: LOAD(tile, x, b), "`source_gmem` of `tma_load`.*global memory, got one to shared memory"),
    (lambda x, tile, b: LOAD(x, x, b), "`tile_smem` of `tma_load`.*shared memory, got one to global memory"),
    (lambda x, tile, b: LOAD(x, tile, None), "`loaded` of `tma_load` must be an mbarrier, got None"),
    (lambda x, tile, b: LOAD(x, tile, tile.at[0]), "`loaded` of `tma_load` must be an mbarrier, got float32"),
    (lambda x, tile, b: STORE(jnp.ones((8, 128)), x), "`tile_smem` of `tma_store`.*an array of float32"),
    (lambda x, tile, b: STORE(x.at[0], tile.at[0]), "`tile_smem` of `tma_store`.*(float32 of shape (128,))"),
    (lambda x, tile, b: STORE(tile, tile), "`destination_gmem` of `tma_store`.*got one to shared memory"),
]


def test_wrong_references_of_copies():
    def body(*refs):
        for call, words in WRONG_COPIES:
            with pytest.raises(TypeError, match=spelled(words)):
                call(*refs)

    jax.eval_shape(mapped(body, scratch=[plgpu.SMEM((8, 128), jnp.float32), plgpu.Barrier()]))


def test_wrong_chunks():
    for arguments, error, words in (
        ((64, 1024, 4, 64, 8), ValueError, "`max_bytes` of `Chunking.cut` must be at least 16, got 8"),
        ((64, 1024, 4, 0, 64), ValueError, "`block_rows` of `Chunking.cut` must be at least 1, got 0"),
        ((64, 1024.0, 4, 64, 64), TypeError, "`shard_cols` of `Chunking.cut` must be a Python int, got 1024.0"),
    ):
        with pytest.raises(error, match=words):
            P_.Chunking.cut(*arguments)


def test_wrong_chunk_buffers():
    chunking = prim.Chunking.cut(8, 128, 4, 8, 1024)

    def body(out, buffers_smem, loaded):
        (counter,) = prim.shared_semaphores((1,))
        there = lambda shard, *place: out.at[place]  # noqa: E731
        in_one_warp(
            lambda: prim.copy_chunks(
                prim.draw(counter.at[0], 4), (0, 4), counter.at[0], chunking, at=lambda i: (0, *chunking.origin(i)),
                source=there, destination=there, landed=print, chunk_buffers_smem=buffers_smem, loaded=loaded,
            )
        )  # fmt: skip

    scratch = [plgpu.SMEM((2, 4, 128), jnp.float32), plgpu.Barrier(num_barriers=2)]
    with pytest.raises(ValueError, match=r"`chunk_buffers_smem`.*of \(2, 128\), got \(2, 4, 128\)"):
        jax.eval_shape(mapped(body, scratch=scratch))


# ---- where a primitive is called -------------------------------------------------------------------------------------


FLAG, PEERS = np.int32(0), prim.PeerGroup("x", (("x", 2),))


OUTSIDE = [
    (lambda: prim.shared_semaphores((1,)), ValueError, "shared_semaphores"),
    (prim.converge_warp, ValueError, "converge_warp"),
    (prim.fence_async_proxy, ValueError, "fence_async_proxy"),
    (prim.wait_stores_read, ValueError, "wait_stores_read"),
    (prim.wait_stores_landed, ValueError, "wait_stores_landed"),
    (lambda: prim.semaphore_signal(FLAG), TypeError, "semaphore_signal"),
    (lambda: prim.semaphore_wait(jnp.int32(0), 1), TypeError, "semaphore_wait"),
    (lambda: prim.semaphore_signal_peer(FLAG, PEERS, 1), TypeError, "semaphore_signal_peer"),
    (lambda: prim.semaphore_wait_peer(FLAG, 1, PEERS, 1), TypeError, "semaphore_wait_peer"),
    (lambda: prim.draw(FLAG, 1), TypeError, "draw"),
    (lambda: LOAD(ROWS, ROWS, FLAG), TypeError, "tma_load"),
]


def test_outside_of_a_kernel():
    for call, error, name in OUTSIDE:
        with pytest.raises(error, match=f"`{name}` must .*kernel"):
            call()


def test_drawing_in_a_warpgroup():
    def body(out):
        (counter,) = prim.shared_semaphores((1,))
        prim.draw(counter.at[0], 2)

    with pytest.raises(ProtocolError, match=r"test_primitive_refusals.*draw: .*one warp \(plgpu.warp_map") as caught:
        run(body)
    assert "cannot run this" not in str(caught.value)


def test_a_partly_manual_shard_map():
    mesh, advice = oracle.make_mesh(x=2, y=2), "leave `axis_names` of `jax.shard_map` out"
    with pytest.raises(ValueError, match=f"`PeerGroup.of` .*over all axes of the mesh.*'y': 2.*{advice}"):
        on_mesh(lambda x: GATHER(x), mesh, axis_names={"x"})(BATCH[0])

    def kernel(x):
        return plgpu.kernel(lambda x, out: None, out_type=ROWS)(x)

    with pytest.raises(NotImplementedError, match=rf"kernel .*leaves the axes \['y'\].*{advice}"), emulate():
        on_mesh(kernel, mesh, axis_names={"x"})(BATCH[0])


def test_the_way_out_of_a_partly_manual_shard_map():
    def along_x(x):
        return jax.shard_map(GATHER, in_specs=P("y"), out_specs=P("y"), check_vma=False, axis_names={"y"})(x)

    mesh = oracle.make_mesh(x=2, y=2)
    with emulate(cores=2):
        got = np.asarray(on_mesh(along_x, mesh, axis_names={"x"})(BATCH[0]))
    np.testing.assert_array_equal(got, BATCH[0].reshape(2, 1, 4, 128).repeat(2, 1).reshape(16, 128))


# ---- reports ---------------------------------------------------------------------------------------------------------


def line_of(text):
    """Returns the number of the line of this file that ends with the comment `text`."""
    with open(__file__) as source:
        (number,) = [n for n, line in enumerate(source, 1) if line.rstrip().endswith(f"# {text}")]
    return number


def waits_and_draws(out):
    counter, flags = prim.shared_semaphores((1,), (1,))

    def act(number):
        prim.semaphore_wait_peer(flags.at[0], 1, prim.PeerGroup.of("x"), 0)  # the wait

    in_one_warp(lambda: prim.each_drawn(counter.at[0], prim.draw(counter.at[0], 1), 1, act))


def test_a_report_names_the_line_in_the_users_kernel():
    with pytest.raises(DeadlockError) as caught:
        run(waits_and_draws)
    where = rf"test_primitive_refusals.py:{line_of('the wait')}(:\d+)? \(act\): semaphore_wait_peer: @early"
    assert re.search(rf"polls .*\(at [^ ]*{where}", str(caught.value))
    assert "overlap/primitives" not in str(caught.value)
