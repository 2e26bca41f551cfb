"""Cases for `tests.assembly`: products of one device, with a gathered operand, and summed over devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tests import assembly
from tests.assembly import Case

if TYPE_CHECKING:
    import jax

# Operands of the epilogue by name. "all" gives every operand at once, with an activation of many operations.
EPILOGUES = {
    "bias": ("bias",),
    "addend": ("addend",),
    "scales": ("lhs_scale", "rhs_scale"),
    "gelu": ("bias",),
    "relu": (),
    "all": ("bias", "addend", "lhs_scale", "rhs_scale"),
}


def pretend_processes(case: Case) -> None:
    """Pretends that the job has as many processes as the case.

    This process is alone, and the next case that it assembles may have another number of processes: so nothing that was
    traced for this number may be kept.
    """
    from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
    from overlap.frame import primitive

    one_shot_kernel.lands_in_an_operand = blocks_kernel.lands_in_an_operand = lambda: case.processes > 1
    primitive.tracer_of.cache_clear()


def product(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a product of one device and its arguments.

    `case.config` holds fields of `Config` and the options that are popped below.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    options = dict(case.config)
    layout, out, batch = options.pop("layout", "nn"), options.pop("out", None), tuple(options.pop("batch", ()))
    rhs_dtype, epilogue = options.pop("rhs_dtype", case.dtype), options.pop("epilogue", None)
    of_blocks = options.pop("block_scales", False)
    config = overlap.Config(**options) if options else None
    activations = {"all": jax.nn.gelu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}
    left, right = (letter == "t" for letter in layout)
    m, n, k = case.shape
    structs = [
        assembly.struct(mesh, (*batch, *((k, m) if left else (m, k))), case.dtype),
        assembly.struct(mesh, (*batch, *((n, k) if right else (k, n))), rhs_dtype),
    ]
    names = EPILOGUES.get(epilogue, ())
    if of_blocks:
        names = (*(name for name in names if not name.endswith("_scale")), "lhs_scale", "rhs_scale")
    shapes = {"bias": (n,), "addend": (*batch, m, n), "lhs_scale": (m, 1), "rhs_scale": (n,)}
    dtypes = {"addend": out or case.dtype}
    if of_blocks:
        # Block scales: one array per operand.
        shapes |= {"lhs_scale": (*batch, *((k // 32, m) if left else (m, k // 32)))}
        shapes |= {"rhs_scale": (*batch, *((n, k // 32) if right else (k // 32, n)))}
        dtypes |= dict.fromkeys(("lhs_scale", "rhs_scale"), "float8_e8m0fnu")
    structs += [assembly.struct(mesh, shapes[name], dtypes.get(name, "f32")) for name in names]

    def call(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        given: dict[str, Any] = dict(zip(names, rest, strict=True))
        return overlap.matmul(
            lhs, rhs, transpose_lhs=left, transpose_rhs=right, preferred_element_type=out, config=config,
            activation=activations.get(epilogue), implementation="fused", **given,
        )  # fmt: skip

    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), tuple(structs)


def gathered(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a product whose operand is gathered along axis x, and its arguments.

    `case.shape` is the shape per shard, as in `tuning.Problem`.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    options = dict(case.config)
    op, out, epilogue = options.pop("op"), options.pop("out"), options.pop("epilogue", None)
    layout, batch = options.pop("layout", "nn"), tuple(options.pop("batch", ()))
    rhs_dtype, keeps = options.pop("rhs_dtype", case.dtype), options.pop("return_gathered", False)
    transport = options.pop("transport", None)
    keywords: dict[str, Any] = dict(
        preferred_element_type=out, config=overlap.Config(**options), implementation="fused"
    )
    (m, n, k), size, transposed = case.shape, mesh.shape["x"], layout[1] == "t"
    if op != "all_gather_lhs_matmul":
        along_k = op.endswith("_k")
        whole_k, left = size * k if along_k else k, layout[0] == "t"
        lhs_shape, lhs_spec = ((whole_k, size * m), P(None, "x")) if left else ((size * m, whole_k), P("x"))
        rhs_shape, rhs_spec = ((size * k, n), P("x", None)) if along_k else ((k, size * n), P(None, "x"))

        def call_rhs(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return overlap.all_gather_rhs_matmul(
                lhs, rhs, "x", dimension=0 if along_k else 1, transpose_lhs=left, **keywords
            )

        mapped = jax.shard_map(call_rhs, mesh=mesh, in_specs=(lhs_spec, rhs_spec), out_specs=P("x"), check_vma=False)
        lhs, rhs = (
            assembly.struct(mesh, lhs_shape, case.dtype, lhs_spec),
            assembly.struct(mesh, rhs_shape, rhs_dtype, rhs_spec),
        )
        return mapped, (lhs, rhs)

    def call(lhs: jax.Array, rhs: jax.Array, *scales: jax.Array) -> Any:
        given = dict(zip(("lhs_scale", "rhs_scale"), scales))
        return overlap.all_gather_lhs_matmul(
            lhs, rhs, "x", transpose_rhs=transposed, return_gathered=keeps, transport=transport, **given, **keywords
        )

    every = (None,) * len(batch)
    lhs_spec, rhs_spec = P(*every, "x", None), P("x", None) if transposed else P(None, "x")
    operands = [
        ((*batch, size * m, k), case.dtype, lhs_spec),
        ((size * n, k) if transposed else (k, size * n), rhs_dtype, rhs_spec),
    ]
    if epilogue is not None:
        operands += [((*batch, size * m, 1), "f32", lhs_spec), ((size * n,), "f32", P("x"))]
    in_specs, out_spec = tuple(spec for *_, spec in operands), P(*every, None, "x")
    out_specs = (out_spec, P()) if keeps else out_spec
    mapped = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped, tuple(assembly.struct(mesh, *operand) for operand in operands)


def scattered(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a product that is summed over axis x (the sum is scattered or all-reduced), and its arguments.

    `case.shape` is the shape of one device's product.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    options = dict(case.config)
    op, out, epilogue = options.pop("op"), options.pop("out"), options.pop("epilogue", None)
    layout, batch = options.pop("layout", "nn"), tuple(options.pop("batch", ()))
    rhs_dtype = options.pop("rhs_dtype", case.dtype)
    (m, n, k), size, (left, right) = case.shape, mesh.shape["x"], (letter == "t" for letter in layout)
    columns, whole, transport = op.endswith("_n"), op == "matmul_all_reduce", options.pop("transport", None)
    pretend_processes(case)
    structs = [
        assembly.struct(mesh, (*batch, *((k, m) if left else (m, k))), case.dtype),
        assembly.struct(mesh, (n, k) if right else (k, n), rhs_dtype),
    ]
    block = (m, n) if whole else (m, n // size) if columns else (m // size, n)
    shapes = {"bias": block[1:], "addend": (*batch, *block), "lhs_scale": (m, 1), "rhs_scale": (n,)} if epilogue else {}
    structs += [
        assembly.struct(mesh, shape, (out or case.dtype) if name == "addend" else "f32")
        for name, shape in shapes.items()
    ]

    def call(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        function: Any = overlap.matmul_all_reduce
        if not whole:
            function = functools.partial(overlap.matmul_reduce_scatter, dimension=int(columns), transport=transport)
        return function(
            lhs, rhs, "x", transpose_lhs=left, transpose_rhs=right,
            preferred_element_type=out, config=overlap.Config(**options), implementation="fused",
            activation=jax.nn.gelu if epilogue else None, **dict(zip(shapes, rest, strict=True)),
        )  # fmt: skip

    out_specs = P() if whole else P("x")
    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False), tuple(structs)


def gradient(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the gradient of a product with two right operands whose left one is gathered, and its arguments.

    It has one kernel for both: a sum of two products, beside which the left operand travels. `case.shape` is the shape
    per shard of the product with the first right operand; the second one has half as many columns.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    pretend_processes(case)
    (m, n, k), size, columns = case.shape, mesh.shape["x"], P(None, "x")

    def call(x: jax.Array, weights: list[jax.Array], d_outs: list[jax.Array]) -> Any:
        multiply = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="fused")
        return jax.vjp(multiply, x, weights)[1](d_outs)

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P("x"), columns, columns), out_specs=(P("x"), columns), check_vma=False
    )
    of_sides = [
        [assembly.struct(mesh, (rows, size * width), case.dtype, columns) for width in (n, n // 2)]
        for rows in (k, size * m)
    ]
    return mapped, (assembly.struct(mesh, (size * m, k), case.dtype, P("x")), *of_sides)
