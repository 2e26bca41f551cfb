"""Names for the values that a kernel's body handles: indices, and references to the memories of a GPU.

jax has no public type for a reference inside a kernel, so to a type checker these names are aliases of `Any`. To a
reader they say which memory a reference denotes.
"""

from __future__ import annotations

from typing import Any

import jax

# A position, size or count: a Python int, or an int32 scalar in a kernel. Functions of a schedule take either kind.
type Index = int | jax.Array
# A condition: a Python bool, or a scalar in a kernel.
type Predicate = bool | jax.Array
# Global memory (HBM) of this device or, from `remote_ref`, of a peer.
type GmemRef = Any
# Shared memory of the CTA.
type SmemRef = Any
# Tensor memory of the SM (Blackwell).
type TmemRef = Any
# An mbarrier in shared memory, or an array of them (`plgpu.Barrier`, `plgpu.ClusterBarrier`).
type BarrierRef = Any
# A semaphore in global memory, or an array of them. This library uses them as flags, which only grow.
type SemaphoreRef = Any
# The type of one of these memories or barriers, or a tree of such types, as in `scratch_types` and `pl.run_scoped`.
type ScratchType = Any
# A tree of arrays, of their types or of references.
type Tree = Any
# The name of an axis of a mesh or of a kernel: any hashable object, though jax's annotations say `str`.
type Axis = Any
# A wgmma accumulator in the registers of a warpgroup (Hopper, `plgpu.WGMMAAccumulatorRef`).
type AccumulatorRef = Any
