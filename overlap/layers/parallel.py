"""The keywords that all layers share, and the shardings that follow from them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict, get_args, get_origin, get_type_hints

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from overlap.frame import arguments
from overlap.frame.arguments import is_in_jit
from overlap.layers.checks import check_flags, check_implementation, check_keywords, check_rows
from overlap.sharded import partitions

Axis = str | tuple[str, ...]


class Options(TypedDict, total=False):
    """Keyword arguments that every layer has; `Parallel` says what they mean."""

    axis: Axis
    fsdp_axis: Axis | None
    batch_axis: Axis | None
    sequence_parallel: bool
    implementation: Literal["fused", "xla"] | None
    keep_gathered: bool | None
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


class Layer(nnx.Module):
    """The base class of this package's modules. Wrong arguments raise an error that names the class that was called.

    Without it, Python would name whichever class or private base refuses an argument that was passed on to it.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        init = inspect.unwrap(cls.__init__)
        if "__init__" in vars(cls):  # For `help`, which else shows the parameters of nnx's metaclass.
            _, *parameters = inspect.signature(init).parameters.values()
            cls.__signature__ = inspect.Signature(parameters)
        if not cls.__module__.startswith("overlap.layers."):  # A user's class takes its own arguments.
            return

        @functools.wraps(init)
        def checked(self: Layer, *args: Any, **given: Any) -> None:
            arguments.bound(cls.__name__, _signature(init), args, given)
            check_keywords(cls.__name__, given)
            init(self, *args, **given)

        cls.__init__ = checked


@functools.cache
def _signature(init: Callable[..., None]) -> inspect.Signature:
    """The signature of a layer's `__init__`, without `self`, and with each of `**options` as a parameter."""
    _, *parameters = inspect.signature(init, eval_str=True).parameters.values()
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        (options,) = get_args(parameters.pop().annotation)
        for name, kind in get_type_hints(options, include_extras=True).items():
            default = inspect.Parameter.empty if get_origin(kind) is Required else None
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return inspect.Signature(parameters)


class Parallel(Layer):
    """The base class of all layers with parameters: it knows how activations and weights are sharded.

    Activations are [..., rows, features]; the first dimension is the batch, if there are three or more.

        between layers      P(batch_axis, axis, None)       rows sharded; P(batch_axis, None, None) without
                                                            sequence parallelism
        inside a layer      P(batch_axis, None, axis)       features or heads sharded

    Called with an argument that does not fit, a layer raises TypeError (no array) or ValueError (other features, or a
    residual of another shape; rows or a batch that the devices do not divide; or as `overlap.sharded_matmul`).

    The keywords are plain attributes. `model.set_attributes(implementation="xla")` changes one of them in all layers of
    a model, as `model.eval()` does for dropout. `nnx.with_attributes(model, sequence_parallel=False)` makes a second
    model with the same parameters.

    Attributes:
      name: the name of this layer in profiles, in the HLO's metadata and in error messages; by default that of its
        class. It is also the name of a linear layer's result for policies of `jax.checkpoint`.
      axis: the mesh axis of tensor parallelism, "tensor" by default. Of `ExpertMLP` it may be several.
      fsdp_axis: the mesh axis (or axes) along which the weights are sharded as well (FSDP); None: none. The weights are
        gathered along it for each product, and their gradients are scattered along it.
      batch_axis: the mesh axis (or axes) along which the batch is sharded (data parallelism); None: none.
      sequence_parallel: whether rows are sharded along `axis` between layers. If not, every device along `axis` has all
        rows there: a column-parallel product gathers nothing, and a row-parallel one ends in an all-reduce. Use False
        for few rows (decoding), or if the devices along `axis` do not divide the rows.
      implementation: "fused" (one kernel for a product and its communication), "xla" (the same layer unfused), or None:
        `overlap.sharded_matmul` chooses for each product.
      keep_gathered: whether gathered activations and weights are kept for the backward pass. None, the default: where a
        kernel runs, the backward pass gathers them again, which is hidden; where XLA runs, as in plain JAX, which in
        one program mostly keeps what it gathers. False: gathered weights are kept in neither. True: all are kept in
        both, also between jitted functions and in a scan. docs/layers.md says what that costs in memory.
      mesh: the mesh; None: that of `jax.set_mesh`. Its axes must be all Explicit or all Auto, since flax requires that.
      part_of: the name of the enclosing layer, if this layer is a part of another one. Only error messages use it: they
        call this layer `part_of.name`, as in "GatedMLP.down". Set it in a layer of your own that contains these.
    """

    name: str
    axis: Axis
    fsdp_axis: Axis | None
    batch_axis: Axis | None
    sequence_parallel: bool
    implementation: Literal["fused", "xla"] | None
    keep_gathered: bool | None
    mesh: Mesh | AbstractMesh | None
    part_of: str | None

    def __init__(
        self,
        *,
        name: str | None = None,
        axis: Axis = "tensor",
        fsdp_axis: Axis | None = None,
        batch_axis: Axis | None = None,
        sequence_parallel: bool = True,
        implementation: Literal["fused", "xla"] | None = None,
        keep_gathered: bool | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        part_of: str | None = None,
    ):
        self.name = type(self).__name__ if name is None else name
        self.part_of = part_of
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
        """The name of this layer in error messages: `name`, with `part_of` in front."""
        return f"{self.part_of}.{self.name}" if self.part_of else self.name

    def _check_axis(self) -> None:
        """Raises ValueError if `axis` is not one axis beside the others."""
        if not isinstance(self.axis, str) or self.axis in (*names_in(self.fsdp_axis), *names_in(self.batch_axis)):
            raise ValueError(
                f"{self.title}: axis must be one mesh axis, other than fsdp_axis and batch_axis, got "
                f"axis={self.axis!r}, fsdp_axis={self.fsdp_axis!r} and batch_axis={self.batch_axis!r}: name an axis "
                "that those two do not name"
            )


def mesh_in_use(layer: Parallel) -> Mesh | AbstractMesh:
    """The layer's mesh, or that of `jax.set_mesh`.

    Raises:
      ValueError: there is none, or it does not have the layer's axes, or these are manual.
    """
    mesh = jax.sharding.get_abstract_mesh() if layer.mesh is None else layer.mesh
    if mesh.empty:
        raise ValueError(
            f"{layer.title} must know the mesh (`with mesh:` is not read): build and call it inside "
            "`with jax.set_mesh(mesh):`, or give mesh="
        )
    sizes = dict(mesh.shape)
    manual = getattr(mesh, "manual_axes", ())
    for keyword, value in (("axis", layer.axis), ("fsdp_axis", layer.fsdp_axis), ("batch_axis", layer.batch_axis)):
        if not set(names_in(value)) <= set(sizes):
            raise ValueError(
                f"{layer.title}: {keyword}={value!r} is no axis of the mesh, which has {sizes}: name one of those, or "
                "call the layer under the mesh that it was built for"
            )
        if set(names_in(value)) & set(manual):
            raise ValueError(
                f"{layer.title}: {keyword}={value!r} must not be manual, and jax.shard_map is over {manual} here: a "
                "layer takes global arrays, so build and call it outside; inside, call the operations, such as "
                "overlap.all_gather_lhs_matmul"
            )
    return mesh


def devices_along(layer: Parallel, axis: Axis | None) -> int:
    """How many devices the layer's mesh has along `axis`; 1 along none."""
    sizes = dict(mesh_in_use(layer).shape)
    return math.prod(sizes[one] for one in names_in(axis))


def divides(layer: Parallel, what: str, size: int, axis: Axis | None, way_out: str) -> None:
    """Raises ValueError if the devices along `axis` do not divide a size.

    `what` and `way_out` are for the message.
    """
    devices = devices_along(layer, axis)
    if size % devices:
        raise ValueError(
            f"{layer.title}: {what}={size} must be a multiple of the {devices} devices along mesh axis {axis!r}: "
            f"{way_out}"
        )


def metadata(layer: Parallel, spec: P) -> dict[str, Any]:
    """The metadata of an nnx.Param that is to have this partition."""
    return {"out_sharding": spec} | ({} if layer.mesh is None else {"mesh": layer.mesh})


def placed(layer: Parallel, x: jax.Array, spec: P, what: str = "activations") -> jax.Array:
    """The activations, sharded as `spec` says. If they are whole along a mesh axis, they are cut along it.

    Cutting moves nothing between devices. `what` is the name of `x` for messages.

    Raises:
      ValueError: on an Explicit mesh, the type of `x` has another sharding.
    """
    mesh = mesh_in_use(layer)
    found = jax.typeof(x).sharding.spec
    for entry, wanted in zip(found, spec, strict=False):
        axes = {axis for axis in names_in(entry) if dict(mesh.shape)[axis] > 1}
        if not axes <= set(names_in(wanted)):
            raise ValueError(f"{layer.title}: {what} must be sharded {spec}, got {found}: jax.reshard(x, {spec}) first")
    of_room = functools.partial(partitions.placed, spec=spec, mesh=mesh)
    # Outside of `jax.jit`, jax brings an array of one device to the mesh in a jitted function only.
    return of_room(x) if is_in_jit() else jax.jit(of_room)(x)


def row_axis(layer: Parallel) -> Axis | None:
    """The axis, or the axes, of `axis` that do not cut the batch: those that cut rows between layers."""
    names = tuple(name for name in names_in(layer.axis) if name not in names_in(layer.batch_axis))
    return names[0] if len(names) == 1 else names or None


def spec_between_layers(layer: Parallel, shape: Sequence[int]) -> P:
    """The partition of activations of this shape between layers.

    Raises:
      ValueError: the shape has no rows, or the devices do not divide the rows or the batch.
    """
    rows = row_axis(layer) if layer.sequence_parallel else None
    spec = _batched(layer, shape, rows, None)
    way_out = "pad them, or use sequence_parallel=False, which keeps all rows on every device"
    divides(layer, "rows (the dimension before the last)", shape[-2], rows, way_out)
    return spec


def spec_inside_layer(layer: Parallel, shape: Sequence[int]) -> P:
    """The partition of activations of this shape inside a layer: the results of a column-parallel product."""
    return _batched(layer, shape, None, layer.axis)


def _batched(layer: Parallel, shape: Sequence[int], *last: Axis | None) -> P:
    check_rows(layer.title, shape)
    if len(shape) > 2:
        way_out = "pad the batch, or use a mesh with fewer devices along that axis"
        divides(layer, "batch (the first dimension)", shape[0], layer.batch_axis, way_out)
    first = (layer.batch_axis, *[None] * (len(shape) - 3)) if len(shape) > 2 else ()
    return P(*first, *last)


def names_in(axis: Axis | None) -> tuple[str, ...]:
    """The names of the mesh axes that `axis` names: none, one or several."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _check(layer: Parallel) -> None:
    """Raises ValueError if the mesh does not have the layer's axes, or the implementation does not exist."""
    check_implementation(layer.title, layer.implementation)
    check_flags(layer.title, sequence_parallel=layer.sequence_parallel)
    if layer.keep_gathered is not None:
        check_flags(layer.title, keep_gathered=layer.keep_gathered)
    layer._check_axis()
    mesh_in_use(layer)  # It has the axes, or this raises.
