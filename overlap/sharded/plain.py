"""A product of global arrays as XLA's partitioner computes it: dots and sharding constraints, without `shard_map`.

This is the program that a user would write without this library. XLA sees all of it: it shares gathers between
products, moves them, and starts them early.

Operands are constrained as well as results. The transpose of a constraint is a constraint, so cotangents are sharded
as their operands are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike

from overlap.frame import by_xla, mesh_axes
from overlap.frame.activation import BEFORE_ACTIVATION, on_all
from overlap.frame.linear import Wanted, tangents_of
from overlap.frame.operands import F32, Leaf, Operands, accumulator, to_rank
from overlap.frame.signatures import AnyMesh
from overlap.kernels.operations import SCATTER_N
from overlap.sharded import partitions
from overlap.sharded.dimensions import Dimensions
from overlap.sharded.parts import Product

F16 = jnp.dtype(jnp.float16)


@dataclasses.dataclass(frozen=True)
class GlobalProduct:
    """A product, and how its arrays lie. Where no kernel runs, XLA computes it as this class says.

    Attributes:
      product: the product as each device computes it where kernels run. `keep_gathered=None` means here: as XLA does
        in plain JAX, which in one program mostly keeps what it gathers.
      mesh: the mesh. Some of its axes may be manual already.
      specs_by_name: for each operand, its name and its partition.
      out_spec: the partition of each result.
      dimensions: which dimensions of the operands count as one.
      columns: for each result, a device's sizes of the dimensions that it has from `rhs`.
    """

    product: Product
    mesh: AnyMesh
    specs_by_name: tuple[tuple[str, jax.P], ...]
    out_spec: jax.P
    dimensions: Dimensions
    columns: tuple[tuple[int, ...], ...]

    @property
    def specs(self) -> dict[str, jax.P]:
        """The partition of each operand."""
        return dict(self.specs_by_name)

    def placed(self, x: jax.Array, spec: jax.P) -> jax.Array:
        """An array, sharded as `spec` says."""
        return partitions.placed(x, spec, self.mesh)

    def compute(self, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Computes the results from global operands, named as `parts.Product` names them."""
        out_dtype = self.product.out_dtype
        activation = self.product.activation
        placed = {name: self.placed(x, self.specs[name]) for name, x in operands.items()}
        if isinstance(self.mesh, Mesh) and not jax.sharding.get_abstract_mesh().axis_names:
            # No context says on which devices the program runs, and types do not. An empty `shard_map` does.
            spec = self.specs["lhs"]
            placed["lhs"] = mesh_axes.enter(lambda x: x, self.mesh, spec, spec, self.mesh.axis_names)(placed["lhs"])
        count = sum(name.startswith("rhs") for name in placed)
        biases, addends = (tuple(placed.get(f"{name}[{i}]") for i in range(count)) for name in ("bias", "addend"))
        scalars = tuple(x for name, x in placed.items() if name.startswith("scalars"))
        products = tuple(self._product(placed, f"rhs[{i}]", out_dtype) for i in range(count))
        added = [[x for x in pair if x is not None] for pair in zip(biases, addends, strict=True)]
        if activation is None and all(len(terms) < 2 and all(x.dtype == out_dtype for x in terms) for terms in added):
            # A single sum has the same bits as one in float32 that is rounded, of which XLA would keep a copy.
            return tuple(
                self.placed(sum((to_rank(x, z.ndim) for x in terms), z), self.out_spec)
                for z, terms in zip(products, added, strict=True)
            )
        if activation is not None:
            products = tuple(checkpoint_name(x, BEFORE_ACTIVATION) for x in products)

        def finished(
            products: Sequence[jax.Array], biases: Sequence[Leaf], addends: Sequence[Leaf], scalars: Sequence[Leaf]
        ) -> tuple[jax.Array, ...]:
            wide = tuple(x.astype(accumulator(x.dtype)) for x in products)
            rest = Operands(wide[0], wide, biases=tuple(biases), addends=tuple(addends))
            applied = activation and on_all(functools.partial(activation, scalars=scalars), self.product.combines)
            return by_xla.finish(wide, rest, out_dtype, applied)

        if activation is not None:
            # Keep what goes into the activation for the backward pass, in its own dtype, and no values in float32.
            policy = jax.checkpoint_policies.nothing_saveable
            finished = jax.checkpoint(finished, policy=policy, prevent_cse=False)
        return tuple(self.placed(x, self.out_spec) for x in finished(products, biases, addends, scalars))

    # --- One product ---

    def _product(self, placed: dict[str, jax.Array], name: str, out_dtype: DTypeLike) -> jax.Array:
        """The product with the right operand `name`, in the dtype of the result, in which sums over devices travel.

        It has a derivative of its own, which chooses the dtypes of the cotangents' products, and what lives on from the
        forward pass (`keep_gathered`):

            True    the gathered operands
            False   the shards; `backward` gathers weights again, and a barrier makes that a gather of its own
            None    the shards; XLA sees that both passes gather the same, and mostly gathers once and keeps the result
        """
        lhs = placed["lhs"]
        rhs = placed[name]
        rows = lhs.ndim - self.dimensions.k
        is_transposed = self.dimensions.transpose_rhs
        k_of_lhs = range(rows, lhs.ndim)
        k_of_rhs = range(rhs.ndim - self.dimensions.k, rhs.ndim) if is_transposed else range(self.dimensions.k)
        n_of_rhs = [i for i in range(rhs.ndim) if i not in k_of_rhs]
        n_of_out = range(rows, rows + self.dimensions.n)

        def multiplied(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            """The product of (lhs, rhs), sharded or gathered. Forward mode differentiates this function."""
            if self.product.plan.gathers and self.product.plan.spec is SCATTER_N:
                # jax's partitioners (0.11.2, 0.12.0.1) multiply the wrong columns if they gather them inside the dot.
                pair = self._gathered(pair, name)
            return self._dot(*pair, (k_of_lhs, k_of_rhs), out_dtype, self.out_spec)

        def backward(
            pair: tuple[jax.Array, jax.Array],
            saved: tuple[jax.Array, jax.Array] | None,
            d_out: jax.Array,
            wanted: tuple[Wanted, Wanted],
        ) -> Any:
            """The cotangents of (lhs, rhs), of the dtypes in `wanted`; None for one that is not wanted."""
            lhs, rhs = saved or pair
            if self.gathers_rhs and self.product.keep_gathered is False:
                # XLA would take this gather of the weights and that of the forward pass as one, and keep its result.
                rhs = lax.optimization_barrier(rhs)
            d_lhs = d_rhs = None
            if wanted[0] is not None:
                d_lhs = self._dot(d_out, rhs, (n_of_out, n_of_rhs), wanted[0], self.specs["lhs"])
            if wanted[1] is not None:
                factors = (d_out, lhs) if is_transposed else (lhs, d_out)
                d_rhs = self._dot(*factors, (range(rows), range(rows)), wanted[1], self.specs[name])
            return d_lhs, d_rhs

        @jax.custom_jvp
        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return multiplied((lhs, rhs))

        def derivative(pair: tuple[jax.Array, jax.Array], tangents: Sequence[Leaf]) -> tuple[jax.Array, jax.Array]:
            """The product and its tangent, whose transpose is `backward`."""
            saved = self._gathered(pair, name) if self.product.keep_gathered else None
            out = multiplied(saved or pair)
            return out, tangents_of(out, pair, tuple(tangents), by_xla=multiplied, backward=backward, saved=saved)

        product.defjvp(derivative, symbolic_zeros=True)
        return product(lhs, rhs)

    @property
    def gathers_rhs(self) -> bool:
        """Whether the right operand is gathered."""
        plan = self.product.plan
        return bool(plan.gathers) or plan.spec.gathers_rhs

    def _gathered(self, pair: tuple[jax.Array, jax.Array], name: str) -> tuple[jax.Array, jax.Array]:
        """The operands of the product that one device computes: gathered along the axes that `plan` names."""
        plan = self.product.plan
        lhs, rhs = pair
        if plan.spec.gathers == "m":
            lhs = self.placed(lhs, _without(self.specs["lhs"], plan.axes))
        of_weights = [axis for _, axes in plan.gathers for axis in axes]
        of_weights += plan.axes if plan.spec.gathers_rhs else ()
        return lhs, self.placed(rhs, _without(self.specs[name], of_weights)) if of_weights else rhs

    def _dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        contracted: tuple[Sequence[int], Sequence[int]],
        dtype: DTypeLike,
        spec: jax.P,
    ) -> jax.Array:
        """A product over the `contracted` dimensions of both operands, of `dtype`, sharded as `spec` says."""
        # In float16 a sum over devices could overflow or lose small terms. In 8 bits it would lose more.
        needs_f32 = F16 in (lhs.dtype, rhs.dtype, jnp.dtype(dtype)) or jnp.dtype(dtype).itemsize < 2
        travels = F32 if needs_f32 else dtype
        explicit = mesh_axes.explicit_axes(self.mesh)
        typed = jax.NamedSharding(self.mesh, partitions.along(spec, explicit)) if explicit else None
        rhs = by_xla.guarded(rhs, self.mesh)
        out = lax.dot_general(lhs, rhs, (contracted, ((), ())), preferred_element_type=travels, out_sharding=typed)
        return self.placed(out, spec).astype(dtype)


def _without(spec: jax.P, axes: Sequence[str]) -> jax.P:
    """A partition, whole along `axes`."""
    return mesh_axes.spec(tuple(axis for axis in part if axis not in axes) for part in mesh_axes.axes_of_spec(spec))
