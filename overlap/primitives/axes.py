"""Names for the axes along which a kernel counts on its own GPU: clusters, CTAs, warpgroups."""

from __future__ import annotations

import dataclasses

from overlap.primitives.types import Axis


@dataclasses.dataclass(frozen=True, eq=False)
class _KernelAxis:
    """Equal to nothing but itself. `description` appears in a printed kernel."""

    description: str

    def __repr__(self) -> str:
        return f"<{self.description}>"


def kernel_axis(description: str) -> Axis:
    """Makes a name for an axis of a kernel's grid, cluster or threads, which no axis of a user's mesh can have.

    `lax.axis_index` inside a kernel looks among the axes of the user's mesh before it looks among the kernel's own. A
    mesh may have an axis of any name, so no string is safe: on a mesh with an axis "cluster", a CTA that asks for the
    index of its cluster would get the position of its GPU. jax accepts any hashable object as a name, and itself uses
    one for the warps of `plgpu.warp_map`; only its annotations say `str`.
    """
    return _KernelAxis(description)
