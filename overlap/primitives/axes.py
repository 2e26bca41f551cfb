"""The axes that a kernel counts along on its own GPU: clusters, CTAs, warpgroups."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class _KernelAxis:
    """Equal to nothing but itself; `description` is for whoever reads a printed kernel."""

    description: str

    def __repr__(self) -> str:
        return f"<{self.description}>"


def kernel_axis(description: str) -> Any:
    """A name for an axis of a kernel's grid, cluster or threads that no axis of a user's mesh can have.

    `lax.axis_index` inside a kernel looks among the axes of the user's mesh before it looks among the kernel's own. A
    mesh may have an axis of any name, so a word would not be safe: on a mesh with an axis "cluster", every CTA would
    take the position of its GPU for the number of its cluster. jax takes any hashable object for a name, as it does
    itself for the warps of `plgpu.warp_map`; only its annotations say `str`.
    """
    return _KernelAxis(description)
