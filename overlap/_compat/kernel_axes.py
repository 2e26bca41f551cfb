"""Whether the kernel that is being traced is one that `jax.vmap` has batched.

Reason: `jax.vmap` of a `plgpu.kernel` runs all elements in one launch, along an axis that jax adds to the grid. The
semaphores that all CTAs of a device share (`pl.get_global`) are then shared by all elements as well, so flags and
counters are wrong, and jax does not refuse it. jax names that axis by a plain `object()`, as it names the axis of the
warps in a `plgpu.warp_map`. No name of another axis is a plain object.

The names of the axes come from `jax.extend.core`, whose name for the function warns against its use. Without that
function, or with other names for jax's own axes, no kernel counts as batched.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a refusal in jax, or semaphores of each element's own.
For upstream: docs/upstream.md#batched-kernels.
"""

from __future__ import annotations


def has_axis_of_jax() -> bool:
    """Whether the code that is being traced is in a batched kernel, or in a single warp (`plgpu.warp_map`)."""
    import jax
    from jax.extend import core

    names = getattr(core, "unsafe_get_axis_names_DO_NOT_USE", tuple)
    of_mesh = jax.sharding.get_abstract_mesh().axis_names
    # jax names these two axes, and no others, by a bare `object()`.
    return any(type(name) is object and name not in of_mesh for name in names())
