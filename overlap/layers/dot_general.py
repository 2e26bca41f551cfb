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


@dataclasses.dataclass(frozen=True)
class ShardedDotGeneral:
    """A function for `nnx.Linear(dot_general=...)`, and for other code that takes a replacement of `lax.dot_general`.

    It contracts the last dimension of `lhs` [..., rows, k] with either dimension of a matrix `rhs`, [k, n] or [n, k],
    without batch dimensions. nnx.Linear (and linen's Dense) need no other contraction. nnx.LinearGeneral over several
    dimensions, nnx.Einsum and convolutions do, and get a NotImplementedError.

    Attributes:
      lhs_sharding: the partition of the inputs. It is needed on a mesh with Auto axes, where types do not say it.
      rhs_sharding: the partition of the kernel, needed under the same condition.
      out_sharding: the partition of the result. The call's own `out_sharding` (`nnx.Linear.__call__(x,
        out_sharding=...)`) takes precedence; one of the two must be given.
      mesh: the mesh; None: that of the operands' types, or of `jax.set_mesh`.
      implementation: as for `overlap.sharded_matmul`.

    Example:
      >>> column = ShardedDotGeneral(P("data", "tensor", None), P(None, "tensor"), P("data", None, "tensor"))
      >>> linear = nnx.Linear(4096, 16384, dot_general=column, rngs=nnx.Rngs(0))
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
        if self.implementation not in ("fused", "xla", None):
            raise ValueError(
                f'ShardedDotGeneral: implementation must be "fused", "xla" or None, got {self.implementation!r}: '
                "leave it out, or name one"
            )

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
        """Computes lhs @ rhs, or lhs @ rhs.T if dimension 1 of `rhs` is contracted.

        Args:
          lhs: [..., rows, k], global.
          rhs: [k, n] or [n, k], global.
          dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as for `lax.dot_general`.
          precision: None or lax.Precision.DEFAULT. Sums are in float32.
          preferred_element_type: dtype of the result.
          out_sharding: the partition of the result.

        Returns:
          [..., rows, n], global.

        Raises:
          NotImplementedError: another contraction, or another precision.
          ValueError: no `out_sharding`; or as `overlap.sharded_matmul`.
        """
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
        asked = tuple(lhs_contracting), tuple(rhs_contracting), tuple(lhs_batch), tuple(rhs_batch)
        if lhs.ndim < 2 or rhs.ndim != 2 or asked not in (((lhs.ndim - 1,), (n,), (), ()) for n in (0, 1)):
            raise NotImplementedError(
                "ShardedDotGeneral contracts the last dimension of lhs [..., rows, k] with one dimension of a matrix "
                f"rhs, without batch dimensions, as nnx.Linear does; got {dimension_numbers} for shapes {lhs.shape} "
                f"and {rhs.shape}: use lax.dot_general there"
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
        return overlap.sharded_matmul(
            lhs,
            rhs,
            lhs_sharding=self.lhs_sharding,
            rhs_sharding=self.rhs_sharding,
            out_sharding=out,
            mesh=self.mesh,
            transpose_rhs=rhs_contracting[0] == 1,
            preferred_element_type=preferred_element_type,
            implementation=self.implementation,
        )
