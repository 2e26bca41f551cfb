"""`overlap.sharded_matmul` in the form of `lax.dot_general`, for layers that take it as an argument."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import NoneType
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.frame import arguments
from overlap.layers.checks import check_flags, check_implementation
from overlap.layers.parallel import Axis, Parallel, check_axis, spec_between_layers, spec_inside_layer
from overlap.sharded.partitions import given_spec

_NAME = "make_dot_general_cls"


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
    """The function of a class that `make_dot_general_cls` makes: it derives the partitions from the ranks."""

    parallel: Literal["column", "row"]
    axis: str
    fsdp_axis: Axis | None
    batch_axis: Axis | None
    sequence_parallel: bool
    implementation: Literal["fused", "xla"] | None
    mesh: Mesh | AbstractMesh | None

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
        """Computes the product. Arguments, result and errors are those of `ShardedDotGeneral`."""
        (_, contracted), _ = dimension_numbers
        count = len(contracted)
        if tuple(sorted(contracted)) != tuple(range(count)):
            raise NotImplementedError(
                f"{_NAME}: the first dimensions of the kernel must be contracted, got {dimension_numbers} for a kernel "
                f"of shape {rhs.shape}: use ShardedDotGeneral, which names the partitions itself"
            )
        keywords = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del keywords["parallel"]
        layer = Parallel(name=_NAME, **keywords)  # It compares the axes with the mesh.
        # Several contracted dimensions, such as heads and head_dim, count as the features.
        shape = lhs.shape[: lhs.ndim - count + 1]
        between = spec_between_layers(layer, shape)
        inside = spec_inside_layer(layer, shape)
        others = [None] * (count - 1)
        if self.parallel == "column":
            partitions = between, P(self.fsdp_axis, *others, self.axis), inside
        else:
            partitions = inside, P(self.axis, *others, self.fsdp_axis), between
        dot = ShardedDotGeneral(*partitions, mesh=self.mesh, implementation=self.implementation)
        return dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)


@dataclasses.dataclass(frozen=True)
class _DotGeneralClass:
    """What `make_dot_general_cls` returns. Equal arguments give equal objects, as static attributes of flax must be."""

    function: _ParallelDotGeneral
    linen_module: bool

    def __call__(self, *arrays: Any, **_: Any) -> Callable[..., jax.Array]:
        if arrays:
            raise TypeError(
                f"{_NAME} returns a class, for dot_general_cls=, and it was called with {len(arrays)} arguments: give "
                "it as dot_general_cls=, or call it first, as in dot_general=cls()"
            )
        return _linen_class()(self.function) if self.linen_module else self.function


@functools.cache
def _linen_class() -> Any:
    from flax import linen

    class ParallelDotGeneral(linen.Module):
        """The function as a module without parameters."""

        function: _ParallelDotGeneral

        def __call__(self, *args: Any, **keywords: Any) -> jax.Array:
            return self.function(*args, **keywords)

    return ParallelDotGeneral


def make_dot_general_cls(
    parallel: Literal["column", "row"],
    *,
    axis: str = "tensor",
    fsdp_axis: Axis | None = None,
    batch_axis: Axis | None = None,
    sequence_parallel: bool = True,
    implementation: Literal["fused", "xla"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    linen_module: bool = False,
) -> Callable[[], Callable[..., jax.Array]]:
    """Makes a class for `dot_general_cls=` of flax's own layers, so that they are tensor-parallel.

    It serves linen's Dense, DenseGeneral and attention, nnx.LinearGeneral and nnx.MultiHeadAttention
    (`qkv_dot_general_cls=` and `out_dot_general_cls=`); and, called, nnx.Linear (`dot_general=cls()`). The partitions
    follow from the ranks of the operands, where `ShardedDotGeneral` is given them. With T, F and B for `axis`,
    `fsdp_axis` and `batch_axis`:

        "column"    [B, rows T, k] @ [k F, n T] -> [B, rows, n T]    as in ColumnParallelLinear: gathers rows
        "row"       [B, rows, k T] @ [k T, n F] -> [B, rows T, n]    as in RowParallelLinear: scatters the sums

    k and n may each be several dimensions, of which the first is sharded: heads, but not head_dim. Operands are
    floating-point, of one dtype, which is that of the result; sums are in float32. The layer makes its kernel as ever:
    shard it as above, by `kernel_metadata=` (nnx) or linen.with_partitioning, else each device holds it whole.

    Args:
      parallel: "column" or "row".
      axis, fsdp_axis, batch_axis, sequence_parallel, implementation, mesh: as for `Parallel`.
      linen_module: whether the class makes a flax.linen.Module, which some callers wrap, such as nnx.bridge.ToNNX.
        linen's and nnx's own layers need none.

    Returns:
      A function without arguments, whose result takes the arguments of `lax.dot_general`, and `out_sharding=`. Equal
      arguments give equal functions.

    Raises:
      TypeError: a flag is neither True nor False, or an axis no name.
      ValueError: there is no such `parallel` or `implementation`, or `axis` is in `fsdp_axis` or `batch_axis`. At the
        call: there is no mesh, it has no such axis, or its devices do not divide rows, batch or features.
      NotImplementedError: at the call, see `ShardedDotGeneral`.

    Examples:
      >>> column = make_dot_general_cls("column", batch_axis="data")
      >>> row = make_dot_general_cls("row", batch_axis="data")
      >>> dense = linen.Dense(16384, use_bias=False, dot_general_cls=column)
      >>> attention = nnx.MultiHeadAttention(
      ...     32, 4096, qkv_dot_general_cls=column, out_dot_general_cls=row, decode=False, rngs=nnx.Rngs(0)
      ... )
    """
    if parallel not in ("column", "row"):
        raise ValueError(
            f'{_NAME}: parallel must be "column" (gathers rows) or "row" (scatters sums), got {parallel!r}: name one'
        )
    check_flags(_NAME, sequence_parallel=sequence_parallel, linen_module=linen_module)
    check_implementation(_NAME, implementation)
    for keyword, value in (("fsdp_axis", fsdp_axis), ("batch_axis", batch_axis)):
        if not isinstance(value, (str, tuple, NoneType)):
            raise TypeError(
                f"{_NAME}: {keyword} must be a mesh axis, a tuple of several or None, got {value!r}: name one, such as "
                '"data"'
            )
    check_axis(_NAME, axis, fsdp_axis, batch_axis)
    function = _ParallelDotGeneral(
        parallel, axis, fsdp_axis, batch_axis, sequence_parallel, implementation, arguments.mesh(mesh)
    )
    return _DotGeneralClass(function, linen_module)
