"""Launches every product of this library as one persistent kernel around a mainloop.

Operations differ in two objects that they pass. A `ProductKernel` holds the sizes, and the flags and the shared memory
of the transport. A `Body` has the tile order and the hooks: where operands lie, and what the communicator warp does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config
from overlap.kernels.grid import GRID_AXIS, RANK_AXIS, THREAD_AXIS, cta
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.launch import sealed
from overlap.kernels.mainloop import Loop, Mainloop, OperandTypes
from overlap.kernels.partial_sums import PartialSums, partial_sums_flags, partial_sums_type
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.primitives import addresses, marks, shared_semaphores
from overlap.primitives.host_mesh import ON_HOST_MESHES
from overlap.primitives.integers import in_32_bits
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, SmemRef, Tree


@dataclasses.dataclass(frozen=True)
class Refs[Inputs, Outputs]:
    """The references that a kernel's body works with.

    Attributes:
      inputs: the operands, as they were passed to `ProductKernel.launch`: a dataclass of arrays, here of references.
      outputs: the results, as their types were passed.
      flags: one array of flags for each shape in `ProductKernel.flags`.
      smem: one reference (or pytree of them) for each type in `ProductKernel.smem`.
    """

    inputs: Inputs
    outputs: Outputs
    flags: tuple[SemaphoreRef, ...]
    smem: tuple[SmemRef, ...]


class Body(Protocol):
    """An operation's tile order and its hooks, which use the kernel's references."""

    def tile_at(self, index: Index) -> Tile:
        """Returns the tile with an index in the tile order. Every role calls this and gets the same tile."""
        ...

    def hooks(self) -> Hooks:
        """Returns the hooks: where operands come from and results go, and what else the roles do."""
        ...


@dataclasses.dataclass(frozen=True)
class ProductKernel:
    """The static properties of a kernel.

    Attributes:
      name: the name of the kernel.
      target: the device. One CTA runs on each of its SMs (with clusters: on as many SMs as whole clusters fit on).
      config: sizes.
      types: dtypes and layouts of what the mainloop loads and stores.
      work: which tiles there are, and which CTA computes which of them.
      flags: shapes of the flags that all CTAs of the device share; they are zero at launch.
      smem: types of the shared memory that the transport needs in addition to the mainloop's.
      peers_read: the inputs, as indices of leaves of the tree, that the peers read or write, in a kernel that gets the
        peers' addresses (`overlap/primitives/addresses.py`); empty: the kernel gets no addresses.
      draws: whether running CTAs draw the tiles from a counter (`tma/drawn.py`); needed if peers wait for tiles.
      aliased_results: pairs of the index of an operand in `peers_read` and the index of a result: the result is written
        to the operand's memory.
    """

    name: str
    target: Target
    config: Config
    types: OperandTypes
    work: StreamK
    flags: tuple[tuple[int, ...], ...] = ()
    smem: tuple[ScratchType, ...] = ()
    peers_read: tuple[int, ...] = ()
    draws: bool = False
    aliased_results: tuple[tuple[int, int], ...] = ()

    @property
    def mainloop(self) -> Mainloop:
        """The mainloop of the target."""
        return mainloop_of(self.target)

    @in_32_bits
    def launch[Inputs, Outputs](
        self,
        inputs: Inputs,
        out_types: Outputs,
        body_of: Callable[[Refs[Inputs, Outputs]], Body],
        work_of: Callable[[Inputs], StreamK] | None = None,
    ) -> Outputs:
        """Runs the kernel on a tree of arrays and returns a tree of results. The caller has checked the operands.

        Args:
          inputs: the operands, a pytree.
          out_types: the results' types, a pytree of `jax.ShapeDtypeStruct`s.
          body_of: a function from the kernel's references to its body.
          work_of: a function from the references of the operands to the work, if data says how much there is. `work` is
            then the most. None: it is `work`.

        Raises:
          ValueError: the configuration does not fit the types or the device.
        """
        config = self.config
        work = self.work
        types = self.types
        self.mainloop.check_config(types, config, self.target)
        leaves, structure = jax.tree.flatten(inputs)
        results_types, out_structure = jax.tree.flatten(out_types)
        sums_flags = [partial_sums_flags(work, config, self.mainloop.compute_warpgroups)] if work.cuts else []
        sums_types = [partial_sums_type(work, config)] if work.cuts else []
        counters = [(1,)] if self.draws else []
        recording = marks.current()
        ctas = work.num_ctas * config.cluster
        entries_types = [] if recording is None else [recording.entries_type(ctas)]
        roles: dict[int, str] = {}

        def body(*refs: GmemRef) -> None:
            given = refs[: len(leaves)]
            outs, rest = _split(refs[len(leaves) :], len(results_types))
            sums, entries = _split(rest, len(sums_types))
            shapes = (*self.flags, *counters, *sums_flags)
            flags = shared_semaphores(*shapes, told=bool(self.peers_read)) if shapes else ()
            own, rest = _split(flags, len(self.flags))
            counter, of_sums = _split(rest, len(counters))
            partial = PartialSums(*sums, *of_sums, transposed=config.swap_operands) if work.cuts else None
            trees = jax.tree.unflatten(structure, given), jax.tree.unflatten(out_structure, outs)

            def run(buffers: Tree, *smem: SmemRef) -> None:
                of_call = body_of(Refs(*trees, own, smem[: len(self.smem)]))
                next_tile = counter[0].at[0] if counter else None
                own_work = work if work_of is None else work_of(trees[0])
                loop = Loop(own_work, of_call.tile_at, config, of_call.hooks(), self.types.layouts, partial, next_tile)
                if recording is None:
                    self.mainloop.run(loop, buffers)
                    return
                with marks.on(marks.Tape(entries[0], smem[-1], cta(config), recording.capacity, roles)):
                    self.mainloop.run(loop, buffers)

            smem_types = [*self.smem, *([] if recording is None else [marks.counts_type()])]
            pl.run_scoped(run, self.mainloop.buffer_types(config, self.types), *smem_types, collective_axes=THREAD_AXIS)

        # A kernel with flags communicates, and may loop over numbers that it draws from a counter.
        patches = self.mainloop.patches(config, types) + ((ON_HOST_MESHES, _compat.WARP_LOOPS) if self.flags else ())
        kernel = self._kernel(body, (*results_types, *sums_types, *entries_types))
        results = sealed(kernel, self.name, patches=patches)(*leaves)
        if recording is not None:
            recording.kernels.append(marks.RecordedKernel(self.name, roles, results[-1]))
        return jax.tree.unflatten(out_structure, results[: len(results_types)])

    def _kernel(self, body: Callable[..., None], out_type: Tree) -> Callable[..., Tree]:
        """Makes a Pallas kernel of `body`, with the grid, the clusters and the warpgroups that the mainloop needs."""
        body.__name__ = self.name
        semantics = plgpu.LoweringSemantics.Warpgroup
        cluster = self.config.cluster
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(self.work.num_ctas,),
            grid_names=(GRID_AXIS,),
            cluster=(cluster,) if cluster > 1 else (),
            cluster_names=(RANK_AXIS,) if cluster > 1 else (),
            num_threads=self.mainloop.num_threads,
            thread_name=THREAD_AXIS,
            # Leave out XLA's barrier between devices before the kernel: a kernel with peers waits itself until they
            # have begun.
            compiler_params=addresses.Params(
                lowering_semantics=semantics, peers_read=self.peers_read, aliased_results=self.aliased_results
            )
            if self.peers_read
            else plgpu.CompilerParams(lowering_semantics=semantics, skip_device_barrier=True),
        )


def _split[T](values: tuple[T, ...], count: int) -> tuple[tuple[T, ...], tuple[T, ...]]:
    return values[:count], values[count:]
