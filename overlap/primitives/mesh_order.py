"""Meshes whose devices are not in the order of their ids: which GPU a logical id stands for.

A kernel names a peer by its position in the mesh, counted row-major over all axes: `axis_index` in a kernel, a remote
reference and a remote signal all speak of positions. On the way to a GPU a position is translated three times:

1. Mosaic GPU takes it as a *rank*: the index into a table with the addresses of all peers.
2. XLA fills that table, one rank per entry of the list of ids that stands in the kernel's custom call
   (`xla_replica_ids`), in the order of the list.
3. XLA reads an entry of the list as a *partition* (group mode "flattened id"), and finds its GPU in the program's
   device assignment, which is the mesh's own order of devices.

So the list that makes ranks and positions the same is 0, 1, 2, … for every mesh, however its devices are permuted, in
one process and in one process per GPU. jax 0.11 and 0.12 list the ids of the *devices* instead, and refuse a mesh where
that would not be the same; of an abstract mesh jax 0.11 lists nothing, which fails when the kernel runs. (jax 0.12
lists 0, 1, 2, … there, as this module does.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import core as mosaic


@dataclasses.dataclass(frozen=True)
class _Position:
    """Stands for the device at a position of a mesh, with the position for its id."""

    id: int


def number_by_position() -> None:
    """Lets kernels that talk to their peers be lowered for meshes with the devices 0 … D − 1 in any order. Idempotent.

    A mesh of other devices, such as the second half of a host, is still refused. For the list serves a second purpose:
    the custom call declares it to XLA as the ids of the *devices* of the clique. Of a permutation that is true, as a
    set; elsewhere it would contradict what XLA declares for its own collectives over the mesh, and the program fails.
    """
    lower = mosaic._mosaic_gpu_lowering_rule
    if getattr(lower, "numbers_by_position", False):
        return

    @functools.wraps(lower)
    def lower_by_position(ctx: Any, *args: Any, **params: Any) -> Any:
        axis_context = ctx.module_context.axis_context
        mesh = getattr(axis_context, "mesh", None)
        if mesh is None:
            return lower(ctx, *args, **params)
        if not has_the_first_devices(mesh):
            try:
                return lower(ctx, *args, **params)
            except NotImplementedError as refusal:
                refusal.add_note(
                    f"A kernel that talks to its peers needs a mesh of the devices 0 to {mesh.size - 1}, in any order: "
                    'let CUDA_VISIBLE_DEVICES name the GPUs of the mesh alone, or use implementation="xla".'
                )
                raise
        positions = np.array([_Position(i) for i in range(mesh.size)]).reshape(mesh.axis_sizes)
        by_position = dataclasses.replace(axis_context, mesh=jax.sharding.Mesh(positions, mesh.axis_names))
        return lower(ctx.replace(module_context=ctx.module_context.replace(axis_context=by_position)), *args, **params)

    lower_by_position.numbers_by_position = True  # pyright: ignore[reportAttributeAccessIssue]
    mosaic._mosaic_gpu_lowering_rule = lower_by_position


def has_the_first_devices(mesh: Any) -> bool:
    """Whether a mesh of D devices holds those with ids 0 … D − 1, in any order; taken for granted of abstract ones."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return True
    return sorted(device.id for device in mesh.devices.flat) == list(range(mesh.size))
