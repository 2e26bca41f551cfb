"""How a layer lies on the mesh: the keywords that all layers share, and the shardings that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Required, TypedDict

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Axis = str | tuple[str, ...]


class Options(TypedDict, total=False):
    """Keyword arguments that every layer has; `Parallel` says what they mean."""

    axis: str
    fsdp_axis: Axis | None
    batch_axis: Axis | None
    sequence_parallel: bool
    implementation: Literal["fused", "xla"] | None
    keep_gathered: bool
    mesh: Mesh | AbstractMesh | None
    part_of: str | None


class LinearOptions(Options, total=False):
    """Keyword arguments that every layer with products has; `ColumnParallelLinear` says what they mean."""

    dtype: DTypeLike | None
    param_dtype: DTypeLike
    preferred_element_type: DTypeLike | None
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    rngs: Required[nnx.Rngs]


class Parallel(nnx.Module):
    """What all layers have in common: where activations and weights lie.

    Activations are [..., rows, features]; the first dimension is the batch, if there are three or more.

        between layers      P(batch_axis, axis, None)       rows sharded; P(batch_axis, None, None) without
                                                            sequence parallelism
        inside a layer      P(batch_axis, None, axis)       features or heads sharded

    All of these are plain attributes. `model.set_attributes(implementation="xla")` changes one in all layers of a
    model, as `model.eval()` does for dropout; `nnx.with_attributes(model, sequence_parallel=False)` makes a second
    model of the same parameters.

    Attributes:
      name: what profiles, the HLO's metadata and error messages call this layer; by default its class. Policies of
        `jax.checkpoint` know the result of a linear layer by it.
      axis: the mesh axis of tensor parallelism, "tensor" by default.
      fsdp_axis: the mesh axis (or axes) along which the weights are sharded too (FSDP); None: along no other. A product
        gathers its weights along it, and their gradients are scattered along it again.
      batch_axis: the mesh axis (or axes) along which the batch is sharded (data parallelism); None: along none.
      sequence_parallel: whether rows are sharded along `axis` between layers. Without it every device along `axis` has
        all rows there: a column-parallel product gathers nothing, and a row-parallel one ends in an all-reduce. For few
        rows (decoding), or rows that the devices along `axis` do not divide.
      implementation: "fused" (one kernel for a product and its communication), "xla" (the same layer unfused), or None:
        `overlap.sharded_matmul` chooses for each product.
      keep_gathered: whether what was gathered (activations, weights) is kept for the backward pass, instead of being
        gathered again: see docs/layers.md for what that costs in memory.
      mesh: the mesh; None: that of `jax.set_mesh`. All its axes are Explicit, or all are Auto: flax asks for that.
      part_of: the name of the layer that this one is a part of, which error messages say too.
    """

    name: str
    axis: str
    fsdp_axis: Axis | None
    batch_axis: Axis | None
    sequence_parallel: bool
    implementation: Literal["fused", "xla"] | None
    keep_gathered: bool
    mesh: Mesh | AbstractMesh | None
    part_of: str | None

    def __init__(
        self,
        *,
        name: str | None = None,
        axis: str = "tensor",
        fsdp_axis: Axis | None = None,
        batch_axis: Axis | None = None,
        sequence_parallel: bool = True,
        implementation: Literal["fused", "xla"] | None = None,
        keep_gathered: bool = False,
        mesh: Mesh | AbstractMesh | None = None,
        part_of: str | None = None,
    ):
        self.name, self.part_of = type(self).__name__ if name is None else name, part_of
        self.axis = axis
        self.fsdp_axis = fsdp_axis
        self.batch_axis = batch_axis
        self.sequence_parallel = sequence_parallel
        self.implementation = implementation
        self.keep_gathered = keep_gathered
        self.mesh = mesh
        _check(self)

    @property
    def title(self) -> str:
        """What error messages call this layer."""
        return f"{self.part_of}.{self.name}" if self.part_of else self.name

    def mesh_in_use(self) -> Mesh | AbstractMesh:
        """The mesh of the layer, or else of `jax.set_mesh`.

        Raises:
          ValueError: there is none.
        """
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise ValueError(
                f"{self.title} must know the mesh: build and call it inside `with jax.set_mesh(mesh):`, or give mesh="
            )
        return mesh

    def divides(self, what: str, size: int, axis: Axis | None, way_out: str) -> None:
        """Raises ValueError if the devices along `axis` do not divide a size."""
        sizes = dict(self.mesh_in_use().shape)
        devices = math.prod(sizes[one] for one in names_in(axis))
        if size % devices:
            raise ValueError(
                f"{self.title}: {what}={size} must be a multiple of the {devices} devices along mesh axis {axis!r}: "
                f"{way_out}"
            )

    def metadata(self, spec: P) -> dict[str, Any]:
        """What an nnx.Param is given so that it is made with, and keeps, this partition."""
        return {"out_sharding": spec} | ({} if self.mesh is None else {"mesh": self.mesh})

    def between(self, shape: Sequence[int]) -> P:
        """The partition of activations of this shape between layers.

        Raises:
          ValueError: they have no rows, or the devices do not divide rows or batch.
        """
        rows = self.axis if self.sequence_parallel else None
        spec = self._batched(shape, rows, None)
        self.divides(
            "rows (the dimension before the last)", shape[-2], rows,
            "pad them, or use sequence_parallel=False, which keeps all rows on every device",
        )  # fmt: skip
        return spec

    def inside(self, shape: Sequence[int]) -> P:
        """The partition of activations of this shape inside a layer: the results of a column-parallel product."""
        return self._batched(shape, None, self.axis)

    def _batched(self, shape: Sequence[int], *last: Axis | None) -> P:
        if len(shape) < 2:
            raise ValueError(f"{self.title}: activations must be [..., rows, features], got shape {tuple(shape)}")
        if len(shape) > 2:
            self.divides(
                "batch (the first dimension)", shape[0], self.batch_axis,
                "pad the batch, or use a mesh with fewer devices along that axis",
            )  # fmt: skip
        first = (self.batch_axis, *[None] * (len(shape) - 3)) if len(shape) > 2 else ()
        return P(*first, *last)


def names_in(axis: Axis | None) -> tuple[str, ...]:
    """The mesh axes of one dimension."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _check(layer: Parallel) -> None:
    """Raises ValueError if the mesh has not the axes that a layer is told, or the implementation is none."""
    if layer.implementation not in ("fused", "xla", None):
        raise ValueError(f'{layer.title}: implementation must be "fused", "xla" or None, got {layer.implementation!r}')
    if not isinstance(layer.axis, str) or layer.axis in (*names_in(layer.fsdp_axis), *names_in(layer.batch_axis)):
        raise ValueError(
            f"{layer.title}: axis must be one mesh axis, other than fsdp_axis and batch_axis, got axis={layer.axis!r}, "
            f"fsdp_axis={layer.fsdp_axis!r} and batch_axis={layer.batch_axis!r}"
        )
    sizes = dict(layer.mesh_in_use().shape)
    for keyword, value in (("axis", layer.axis), ("fsdp_axis", layer.fsdp_axis), ("batch_axis", layer.batch_axis)):
        if not set(names_in(value)) <= set(sizes):
            raise ValueError(f"{layer.title}: {keyword}={value!r} is no axis of the mesh, which has {sizes}")
