"""`overlap.sharded_matmul` in the form of `lax.dot_general`, for layers that take it as an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.layers.checks import check_implementation
from overlap.layers.parallel import Axis, Parallel, spec_between_layers, spec_inside_layer
from overlap.sharded.partitions import given_spec


@dataclasses.dataclass(frozen=True)
class ShardedDotGeneral:
    """A function for `nnx.Linear(dot_general=...)`, and for other code that takes a replacement of `lax.dot_general`.

    It contracts the last dimensions of `lhs` with the first or the last ones of `rhs`, in the same order, without batch
    dimensions: all that nnx.Linear, nnx.LinearGeneral and nnx.MultiHeadAttention need (and linen's Dense and
    DenseGeneral), and nnx.Einsum with `einsum_op=functools.partial(jnp.einsum, _dot_general=...)` over adjacent
    dimensions. Other contractions and convolutions get a NotImplementedError.

    Attributes:
      lhs_sharding: the partition of the inputs. It is needed on a mesh with Auto axes, where types do not say it.
      rhs_sharding: the partition of the kernel, needed under the same condition.
      out_sharding: the partition of the result. The call's own `out_sharding` (`nnx.Linear.__call__(x,
        out_sharding=...)`) takes precedence; one of the two must be given.
      mesh: the mesh; None: that of the operands' types, or of `jax.set_mesh`.
      implementation: as for `overlap.sharded_matmul`.

    Examples:
      >>> column = ShardedDotGeneral(P("data", "tensor", None), P(None, "tensor"), P("data", None, "tensor"))
      >>> linear = nnx.Linear(4096, 16384, dot_general=column, rngs=nnx.Rngs(0))
      >>> heads = ShardedDotGeneral(P("data", "tensor", None), P(None, "tensor"), P("data", None, "tensor"))
      >>> query = nnx.LinearGeneral(4096, (32, 128), dot_general=heads, rngs=nnx.Rngs(0))
    """

    lhs_sharding: P | None = None
    rhs_sharding: P | None = None
    out_sharding: P | None = None
    mesh: Mesh | AbstractMesh | None = None
    implementation: Literal["fused", "xla"] | None = None

    def __post_init__(self) -> None:
        for name in ("lhs_sharding", "rhs_sharding", "out_sharding"):
            if not isinstance(given := getattr(self, name), (P, NamedSharding, NoneType)):
                raise TypeError(
                    f"ShardedDotGeneral: {name} must be a PartitionSpec of the whole array, such as "
                    f'P("data", None, "tensor"), or None, got {given!r}: give jax.P(…)'
                )
        check_implementation("ShardedDotGeneral", self.implementation)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes the product of `lhs` and `rhs` over the contracted dimensions.

        Args:
          lhs: [..., rows, *k], global.
          rhs: [*k, *n] or [*n, *k], global.
          dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as for `lax.dot_general`.
          precision: None or lax.Precision.DEFAULT. Sums are in float32.
          preferred_element_type: dtype of the result.
          out_sharding: the partition of the result.

        Returns:
          [..., rows, *n], global.

        Raises:
          NotImplementedError: another contraction, or another precision.
          ValueError: no `out_sharding`; or as `overlap.sharded_matmul`.
        """
        (lhs_contracting, rhs_contracting), batch = dimension_numbers
        pairs = sorted(zip(lhs_contracting, rhs_contracting, strict=True))
        count = len(pairs)
        rest = lhs.ndim - len(pairs)
        first, last = ([(rest + i, start + i) for i in range(count)] for start in (0, rhs.ndim - count))
        if any(map(len, batch)) or pairs not in (first, last) or not 0 < count < min(lhs.ndim, rhs.ndim):
            raise NotImplementedError(
                "ShardedDotGeneral contracts the last dimensions of lhs with the first or the last ones of rhs, in the "
                f"same order and without batch dimensions, as nnx.LinearGeneral does; got {dimension_numbers} for "
                f"shapes {lhs.shape} and {rhs.shape}: transpose an operand, or use lax.dot_general there"
            )
        if precision not in (None, lax.Precision.DEFAULT, "default"):
            raise NotImplementedError(
                f"ShardedDotGeneral has the default precision, got {precision!r}: use lax.dot_general there"
            )
        out = self.out_sharding if out_sharding is None else out_sharding
        if out is None:
            raise ValueError(
                "ShardedDotGeneral must know how its result is sharded: give it out_sharding=, or give that to the call"
            )
        # `sharded_matmul` takes the number of contracted dimensions from the number of entries.
        spec = given_spec("out_sharding", out)
        spec = spec.update(partitions=(*spec, *[None] * (rest + rhs.ndim - count - len(spec))))
        return overlap.sharded_matmul(
            lhs,
            rhs,
            lhs_sharding=self.lhs_sharding,
            rhs_sharding=self.rhs_sharding,
            out_sharding=NamedSharding(out.mesh, spec) if isinstance(out, NamedSharding) else spec,
            mesh=self.mesh,
            transpose_rhs=pairs != first,
            preferred_element_type=preferred_element_type,
            implementation=self.implementation,
        )


@dataclasses.dataclass(frozen=True)
class _ParallelDotGeneral:
    """What `make_dot_general_cls` returns: called without arguments itself, else the product.

    Equal arguments give equal objects, as static attributes of flax must be.
    """

    parallel: Literal["column", "row"]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        if not operands:
            return self
        lhs, _, ((_, contracted), _), *_ = operands
        count = len(contracted)
        if tuple(contracted) != tuple(range(count)):
            raise ValueError(
                "make_dot_general_cls: the product must contract the first dimensions of the kernel, got dimensions "
                f"{tuple(contracted)}: use `ShardedDotGeneral`, which is given the partitions, or transpose the kernel"
            )
        layer = Parallel(name="make_dot_general_cls", **dict(self.keywords))  # It checks the keywords.
        shape = lhs.shape[: lhs.ndim - count + 1]  # Heads and head_dim count as the features.
        between = spec_between_layers(layer, shape)
        inside = spec_inside_layer(layer, shape)
        others = [None] * (count - 1)
        if self.parallel == "column":
            partitions = between, P(layer.fsdp_axis, *others, layer.axis), inside
        else:
            partitions = inside, P(layer.axis, *others, layer.fsdp_axis), between
        dot = ShardedDotGeneral(*partitions, mesh=layer.mesh, implementation=layer.implementation)
        return dot(*operands, **keywords)


def make_dot_general_cls(
    parallel: Literal["column", "row"],
    *,
    axis: str = "tensor",
    fsdp_axis: Axis | None = None,
    batch_axis: Axis | None = None,
    sequence_parallel: bool = True,
    implementation: Literal["fused", "xla"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Any]:
    """Makes a class for `dot_general_cls=` of flax's own layers, whose products are then tensor-parallel.

    It serves linen's Dense, DenseGeneral and attention, nnx.LinearGeneral and nnx.MultiHeadAttention, and as
    `dot_general=` nnx.Linear. The partitions follow from the ranks; `ShardedDotGeneral` is given them. With T, F and B
    for `axis`, `fsdp_axis` and `batch_axis`:

        "column"    [B, rows T, k] @ [k F, n T] -> [B, rows, n T]    as in ColumnParallelLinear: gathers rows
        "row"       [B, rows, k T] @ [k T, n F] -> [B, rows T, n]    as in RowParallelLinear: scatters the sums

    k and n may each be several dimensions, of which the first is sharded: heads, but not head_dim. The layer makes its
    kernel as ever; shard it as above (nnx: `kernel_metadata=`), or each device holds all of it. Operands are
    floating-point, of one dtype, which is that of the result. The first dimensions of the kernel are contracted.

    Args:
      parallel: "column" or "row".
      axis, fsdp_axis, batch_axis, sequence_parallel, implementation, mesh: as for `Parallel`.

    Raises:
      ValueError: there is no such `parallel`.
      TypeError, ValueError, NotImplementedError: at the call, as `Parallel` and `ShardedDotGeneral`.

    Examples:
      >>> column, row = (make_dot_general_cls(kind, batch_axis="data") for kind in ("column", "row"))
      >>> dense = linen.Dense(16384, dot_general_cls=column)
      >>> attention = nnx.MultiHeadAttention(32, 4096, qkv_dot_general_cls=column, out_dot_general_cls=row, ...)
    """
    if parallel not in ("column", "row"):
        raise ValueError(
            f'make_dot_general_cls: parallel must be "column" (gathers rows) or "row" (scatters sums), got '
            f"{parallel!r}: name one"
        )
    keywords = {"axis": axis, "fsdp_axis": fsdp_axis, "batch_axis": batch_axis, "sequence_parallel": sequence_parallel,
                "implementation": implementation, "mesh": mesh}  # fmt: skip
    return _ParallelDotGeneral(parallel, tuple(keywords.items()))
