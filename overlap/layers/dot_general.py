"""`overlap.sharded_matmul` in the form of `lax.dot_general`, for layers that take it as an argument."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.layers.checks import check_implementation
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
