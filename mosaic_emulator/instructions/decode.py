"""Decodes a kernel: turns the parameters of the primitive behind `plgpu.kernel` into a `Program`.

The handlers' modules are imported here only because they register their handlers (`program.handles`) on import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..execution.machine import Thread
from ..execution.program import Decoder, Program
from ..foundations.equations import JaxObject
from . import (  # noqa: F401
    clusters,
    control,
    data,
    inline,
    multimem,
    scopes,
    signals,
    tcgen05,
    tensor_memory,
    transfers,
)


def decode(eqn_params: Mapping[str, JaxObject], in_avals: Sequence[object], device_ids: tuple[int, ...]) -> Program:
    """Decodes a kernel.

    Args:
        eqn_params: the parameters of the primitive that `plgpu.kernel` binds.
        in_avals: the types of the kernel's operands.
        device_ids: the ids of the mesh's devices, in order.

    Raises:
        NotImplementedError: the kernel uses something that is not emulated.
    """
    (mesh,), (jaxpr,) = eqn_params["meshes"], eqn_params["jaxprs"]
    if not hasattr(mesh, "num_threads"):
        raise NotImplementedError(f"only Mosaic GPU kernels are emulated, got a kernel over {type(mesh).__name__}")
    program = Program()
    program.device_ids = device_ids
    cluster = tuple(mesh.cluster)
    program.cluster = dict(zip(mesh.cluster_names, cluster))
    program.num_threads = mesh.num_threads
    program.grid = (*mesh.grid, *cluster)
    program.axis_names = (*mesh.grid_names, *mesh.cluster_names)
    if mesh.num_threads is not None:
        program.axis_names += (mesh.thread_name,)
    program.has_barrier = not getattr(eqn_params["compiler_params"], "skip_device_barrier", False)
    program.out_avals = tuple(eqn_params["out_avals"])
    program.aliases = dict(eqn_params["input_output_aliases"])
    decoder = Decoder(program)
    program.parameters = [decoder.new() for _ in jaxpr.invars]
    program.input_is_ref = [hasattr(v.aval, "inner_aval") for v in jaxpr.invars[: len(in_avals)]]
    decoder.inline(jaxpr, program.parameters)
    # `jax.vmap` adds an axis to the grid, whose name is a plain object.
    if any(type(name) is object for name in mesh.grid_names) and program.words:
        raise NotImplementedError(
            f"`jax.vmap` of a kernel with semaphores that all CTAs share ({program.words[0]}, by pl.get_global) runs "
            "all elements in one launch with the same semaphores, and the results would be wrong: map with "
            "`jax.lax.map`, give the function that calls the kernel to `jax.custom_batching.sequential_vmap` before "
            "`jax.vmap`, or give the kernel a batch dimension"
        )
    decoder.emit(_exit, None, "exit", visible=True)
    return program


def _exit(thread: Thread) -> bool:
    thread.machine.leave(thread)
    return True
