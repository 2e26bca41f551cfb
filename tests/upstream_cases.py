"""Programs that jax refuses today, one for each section of docs/upstream.md that quotes an error. No GPU is needed.

Run as a program, it prints {name: the error, or None if nothing failed}. It does not import this library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P


def lower(body: Callable[..., None], out: jax.ShapeDtypeStruct, scratch: list[Any], **cluster: Any) -> None:
    warpgroups = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, compiler_params=warpgroups, **cluster)
    jax.jit(kernel).trace().lower(lowering_platforms=("cuda",))


def loops_in_warps() -> None:
    def body(out_gmem, done):
        @plgpu.warp_map
        def _(warp):
            end = lax.while_loop(lambda x: x < 100, lambda x: 3 * x + 1, warp)
            pl.when(end > 200)(lambda: plgpu.barrier_arrive(done))

    lower(body, jax.ShapeDtypeStruct((128,), jnp.int32), [plgpu.Barrier()])


def arrivals_of_warps_at_cluster_barriers() -> None:
    def body(out_gmem, done):
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: plgpu.barrier_arrive(done))

    scratch = [plgpu.ClusterBarrier(collective_axes=("rank",))]
    lower(body, jax.ShapeDtypeStruct((128,), jnp.int32), scratch, cluster=(2,), cluster_names=("rank",))


def parts_of_a_buffer_in_a_cluster() -> None:
    def body(out_gmem, buffer_smem):
        of_other_cta = plgpu.cluster_ref(buffer_smem.at[1], {"rank": jnp.int32(1)})
        out_gmem[...] = plgpu.load(of_other_cta, layout=plgpu.Layout.WG_STRIDED((128,), 1))

    scratch = [plgpu.SMEM((2, 128), jnp.float32)]
    lower(body, jax.ShapeDtypeStruct((128,), jnp.float32), scratch, cluster=(2,), cluster_names=("rank",))


def multiply_in_tiles(lhs_rows: int, rhs_rows: int) -> None:
    """A product of operands in tiles of these numbers of rows × 64."""

    def body(out_gmem, lhs_smem, rhs_smem, out_smem):
        def multiply(acc):
            plgpu.wgmma(acc, lhs_smem, rhs_smem)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64))).astype(jnp.float16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    def operand(rows: int) -> Any:
        transforms = plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM((64, 64), jnp.float16, transforms=transforms)

    scratch = [operand(lhs_rows), operand(rhs_rows), plgpu.SMEM((64, 64), jnp.float16)]
    lower(body, jax.ShapeDtypeStruct((64, 64), jnp.float16), scratch)


def square_tiles() -> None:
    multiply_in_tiles(64, 64)


def unequal_tiles() -> None:
    multiply_in_tiles(8, 64)


def peer_groups() -> None:
    def body(x_gmem, out_gmem):
        flag = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.semaphore_signal(flag, 1, device_id=lax.rem(lax.axis_index("x") + 1, 4))
        pl.semaphore_wait(flag, 1)

    mesh = Mesh(jax.devices()[3::-1], ("x",))
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32))
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    jax.jit(mapped).trace(jax.ShapeDtypeStruct((512,), jnp.int32)).lower(lowering_platforms=("cuda",))


def varying_axes() -> None:
    def per_device(slope):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            jax.make_jaxpr(lambda y: y * slope.sum())(jax.ShapeDtypeStruct((), jnp.float32))
        return slope

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.make_jaxpr(jax.shard_map(per_device, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.ones(4))


CASES = (
    loops_in_warps,
    arrivals_of_warps_at_cluster_barriers,
    parts_of_a_buffer_in_a_cluster,
    square_tiles,
    unequal_tiles,
    peer_groups,
    varying_axes,
)


def failures() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for case in CASES:
        try:
            found[case.__name__.replace("_", "-")] = case()
        except Exception as error:
            found[case.__name__.replace("_", "-")] = str(error)
    return found


if __name__ == "__main__":
    print(failures())
