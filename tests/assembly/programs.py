"""Programs to assemble: products of one device, with a gathered operand, and summed over devices; and other kernels.

Each function takes `(case, mesh)` and returns a function with its arguments. `case.shape` is (m, n, k) of one device.
`case.config` has fields of `Config` beside the options that the function removes from it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tests.assembly.assembly import Case, struct

if TYPE_CHECKING:
    import jax

Program = tuple[Any, tuple[Any, ...]]
# Operands of the epilogue by name. "all" gives every operand at once, with an activation of many operations.
EPILOGUES = {
    "bias": ("bias",),
    "addend": ("addend",),
    "scales": ("lhs_scale", "rhs_scale"),
    "gelu": ("bias",),
    "relu": (),
    "all": ("bias", "addend", "lhs_scale", "rhs_scale"),
}
BLOCK = 32  # Elements along k with a block scale in common.


class Options:
    """The options of a case, and what is left of them: the configuration."""

    def __init__(self, case: Case) -> None:
        options = dict(case.config)
        self.op = options.pop("op", "all_gather_lhs_matmul")
        self.out, self.epilogue = options.pop("out", None), options.pop("epilogue", None)
        self.layout, self.batch = options.pop("layout", "nn"), tuple(options.pop("batch", ()))
        self.left, self.right = (letter == "t" for letter in self.layout)
        self.rhs_dtype, self.transport = options.pop("rhs_dtype", case.dtype), options.pop("transport", None)
        self.keeps, self.block_scales = options.pop("return_gathered", False), options.pop("block_scales", False)
        # The columns of several right operands; whether the axes of the mesh are reversed, and its devices as well.
        self.widths, self.reverse = tuple(options.pop("widths", ())), options.pop("reverse", False)
        self.gated = options.pop("gated", False)
        self.fields = options

    def keywords(self) -> dict[str, Any]:
        """Returns the keywords that all operations have."""
        import overlap

        config = overlap.Config(**self.fields) if self.fields else None
        return dict(preferred_element_type=self.out, config=config, implementation="fused")


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Combines two products to one."""
    import jax

    return jax.nn.silu(gate) * up


def pretend_processes(case: Case) -> None:
    """Pretends that the job has as many processes as the case.

    This process is alone, and the next case that it assembles may have another number of processes: so nothing that was
    traced for this number may be kept.
    """
    from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
    from overlap.collectives.rows import row_kernels
    from overlap.frame import primitive

    for module in (blocks_kernel, one_shot_kernel, row_kernels):
        module.lands_in_an_operand = lambda: case.processes > 1
    primitive.tracer_of.cache_clear()


def matmul(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A product of one device."""
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    given, (m, n, k) = Options(case), case.shape
    lhs, rhs = (k, m) if given.left else (m, k), (n, k) if given.right else (k, n)
    names = EPILOGUES.get(given.epilogue, ())
    shapes = {"bias": (n,), "addend": (*given.batch, m, n), "lhs_scale": (m, 1), "rhs_scale": (n,)}
    dtypes = {"addend": given.out or case.dtype}
    if given.block_scales:
        names = tuple(dict.fromkeys((*names, "lhs_scale", "rhs_scale")))
        shapes["lhs_scale"] = (*given.batch, *((k // BLOCK, m) if given.left else (m, k // BLOCK)))
        shapes["rhs_scale"] = (*given.batch, *((n, k // BLOCK) if given.right else (k // BLOCK, n)))
        dtypes |= dict.fromkeys(("lhs_scale", "rhs_scale"), "float8_e8m0fnu")
    structs = [struct(mesh, (*given.batch, *lhs), case.dtype), struct(mesh, (*given.batch, *rhs), given.rhs_dtype)]
    structs += [struct(mesh, shapes[name], dtypes.get(name, "f32")) for name in names]
    activation = {"all": jax.nn.gelu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}.get(given.epilogue)

    def call(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        return overlap.matmul(
            lhs, rhs, transpose_lhs=given.left, transpose_rhs=given.right, activation=activation,
            **given.keywords(), **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), tuple(structs)


def all_gather_lhs_matmul(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A product whose left operand is gathered along axis x. Other axes of the mesh hold independent problems.

    With `widths` there are several right operands. "all" gives scales of rows and of columns; "gated" combines two
    products.
    """
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import overlap

    given, (m, n, k) = Options(case), case.shape
    over: Any = "x"
    if given.reverse:
        over = mesh.axis_names[::-1]
        mesh = jax.sharding.Mesh(np.asarray(mesh.devices).ravel()[::-1].reshape(mesh.devices.shape), mesh.axis_names)
    data = () if given.reverse else tuple(name for name in mesh.axis_names if name != "x")
    copies = int(np.prod([mesh.shape[name] for name in data], dtype=int))
    size = mesh.size // copies
    lead, widths = (None,) * len(given.batch), given.widths or ((n, n) if given.gated else (n,))
    along_rows = (*data, *over) if given.reverse else (*data, over)
    rows, columns = P(*lead, along_rows, None), P(over, None) if given.right else P(None, over)
    out = P(*lead, data or None, over)
    scaled, vectors = given.epilogue is not None or given.block_scales, P(over)
    whole = [(size * width, k) if given.right else (k, size * width) for width in widths]
    scales = [((*given.batch, copies * size * m, 1), "f32", rows)]
    scales += [((size * width,), "f32", vectors) for width in widths]
    if given.block_scales:
        scales = [((size * m, k // BLOCK), "float8_e8m0fnu", rows), ((size * n, k // BLOCK), "float8_e8m0fnu", columns)]
    arrays = [((*given.batch, copies * size * m, k), case.dtype, rows)]
    arrays += [(shape, given.rhs_dtype, columns) for shape in whole] + (scales if scaled else [])

    def call(lhs: jax.Array, *rest: jax.Array) -> Any:
        rhs, each = rest[: len(widths)], rest[len(widths) :]
        several = len(widths) > 1
        more: dict[str, Any] = dict(activation=swiglu) if given.gated else {}
        if each:
            more |= dict(lhs_scale=each[0], rhs_scale=tuple(each[1:]) if several else each[1])
        if given.gated and each:
            more |= dict(bias=tuple(each[1:]))
        return overlap.all_gather_lhs_matmul(
            lhs, rhs if several else rhs[0], over, transpose_rhs=given.right, return_gathered=given.keeps,
            transport=given.transport, **more, **given.keywords(),
        )  # fmt: skip

    outs: Any = tuple(out for _ in widths) if len(widths) > 1 and not given.gated else out
    specs = tuple(spec for *_, spec in arrays)
    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=specs, out_specs=(outs, P()) if given.keeps else outs, check_vma=False
    )
    return mapped, tuple(struct(mesh, *array) for array in arrays)


def all_gather_rhs_matmul(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A product whose right operand is gathered along axis x; `op` ends with the dimension."""
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    given, (m, n, k), size = Options(case), case.shape, mesh.shape["x"]
    along_k = given.op.endswith("_k")
    whole_k = size * k if along_k else k
    lhs, lhs_spec = ((whole_k, size * m), P(None, "x")) if given.left else ((size * m, whole_k), P("x"))
    rhs, rhs_spec = ((size * k, n), P("x", None)) if along_k else ((k, size * n), P(None, "x"))
    call = functools.partial(
        overlap.all_gather_rhs_matmul, axis_name="x", dimension=0 if along_k else 1, transpose_lhs=given.left,
        **given.keywords(),
    )  # fmt: skip
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(lhs_spec, rhs_spec), out_specs=P("x"), check_vma=False)
    return mapped, (struct(mesh, lhs, case.dtype, lhs_spec), struct(mesh, rhs, given.rhs_dtype, rhs_spec))


def summed(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A product that is summed over axis x (the sum is scattered or all-reduced)."""
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    given, (m, n, k), size = Options(case), case.shape, mesh.shape["x"]
    pretend_processes(case)
    columns, whole = given.op.endswith("_n"), given.op == "matmul_all_reduce"
    block = (m, n) if whole else (m, n // size) if columns else (m // size, n)
    shapes = {"bias": block[1:], "addend": (*given.batch, *block), "lhs_scale": (m, 1), "rhs_scale": (n,)}
    shapes = shapes if given.epilogue else {}
    structs = [
        struct(mesh, (*given.batch, *((k, m) if given.left else (m, k))), case.dtype),
        struct(mesh, (n, k) if given.right else (k, n), given.rhs_dtype),
        *(struct(mesh, shape, given.out if name == "addend" else "f32") for name, shape in shapes.items()),
    ]
    function: Any = overlap.matmul_all_reduce
    if not whole:
        function = functools.partial(
            overlap.matmul_reduce_scatter, dimension=int(columns), transport=given.transport
        )  # fmt: skip

    def call(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        return function(
            lhs, rhs, "x", transpose_lhs=given.left, transpose_rhs=given.right,
            activation=jax.nn.gelu if given.epilogue else None,
            **given.keywords(), **dict(zip(shapes, rest, strict=True)),
        )  # fmt: skip

    out = P() if whole else P("x")
    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False), tuple(structs)


def gradient(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """The gradient of a product with two right operands whose left one is gathered.

    It has one kernel for both: a sum of two products, beside which the left operand travels. The second right operand
    has half as many columns as the first.
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
        [struct(mesh, (rows, size * width), case.dtype, columns) for width in (n, n // 2)] for rows in (k, size * m)
    ]
    return mapped, (struct(mesh, (size * m, k), case.dtype, P("x")), *of_sides)


def ladder(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """One rung of the Hopper or Blackwell ladder."""
    import jax
    from jax.sharding import PartitionSpec as P

    from lessons import blackwell, hopper

    (m, n, k), rungs = case.shape, (hopper if case.target == "h200" else blackwell).RUNGS
    rung = next(rung for rung in rungs if rung.name == case.config["rung"])
    mapped = jax.shard_map(rung.matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return mapped, (struct(mesh, (m, k), case.dtype), struct(mesh, (k, n), case.dtype))


def grouped_matmul(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A product of 16 groups of rows; with "contracts" the contraction over the rows of each group.

    With "pairs" the product is a sum of two, as in the backward pass of a gated product.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap
    from overlap.frame.activation import traced
    from overlap.frame.operands import Operands
    from overlap.kernels import epilogue
    from overlap.single_gpu import grouped_product
    from tests.ops.grouped_plans import plan_of

    fields, (m, n, k), groups = dict(case.config), case.shape, 16
    options = "contracts", "gated", "pairs", "transpose_rhs", "through"
    contracts, gated, pairs, right, through = (fields.pop(name, False) for name in options)
    lhs, sizes, config = struct(mesh, (m, k), case.dtype), struct(mesh, (groups,), "int32"), overlap.Config(**fields)
    # The mesh says which GPU the kernel is for.
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def contract(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        given = Operands(lhs, (rhs,), group_sizes=sizes)
        return grouped_product.contraction(given, plan_of(given, config, lhs.dtype))

    if contracts:
        return on_mesh(contract), (lhs, struct(mesh, (m, n), case.dtype), sizes)
    rhs = struct(mesh, (groups, *((n, k) if right else (k, n))), case.dtype)
    if pairs:

        def of_pairs(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
            given = Operands(lhs, (rhs,), group_sizes=sizes, more_lefts=(lhs,), more_rights=(rhs,))
            return grouped_product.rows(given, plan_of(given, config, lhs.dtype, right), clears=True)

        return on_mesh(of_pairs), (lhs, rhs, sizes)
    if through:
        activation, _ = traced(swiglu, arrays=2)
        beside = [struct(mesh, (m, n), case.dtype)] * 2

        def with_values(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, bias: jax.Array) -> Any:
            given = Operands(lhs, (rhs, rhs), biases=(bias, bias), group_sizes=sizes)
            how = grouped_product.EpilogueOperands(epilogue.ProgramResults(activation.with_values(lhs.dtype), 3))
            plan = plan_of(given, config, lhs.dtype, right, gated=activation)
            return grouped_product.rows_through(given, plan, how)

        def of_cotangent(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, weights: jax.Array, *z: jax.Array) -> Any:
            given = Operands(lhs, (rhs,), row_scale=weights, group_sizes=sizes)
            how = grouped_product.EpilogueOperands(epilogue.ProgramResults(activation.of_cotangent(), 3, sums=True), z)
            return grouped_product.rows_through(given, plan_of(given, config, lhs.dtype, right), how)

        if through == "values":
            return on_mesh(with_values), (lhs, rhs, sizes, struct(mesh, (groups, n), "float32"))
        return on_mesh(of_cotangent), (lhs, rhs, sizes, struct(mesh, (m,), "float32"), *beside)
    keywords: dict[str, Any] = {"transpose_rhs": right, "config": config, "implementation": "fused"}

    def function(lhs: jax.Array, sizes: jax.Array, bias: jax.Array, *rhs: jax.Array) -> jax.Array:
        given, biases = (list(rhs), [bias] * 2) if gated else (rhs[0], bias)
        activation = swiglu if gated else jax.nn.gelu
        return overlap.grouped_matmul(lhs, given, sizes, bias=biases, activation=activation, **keywords)

    return on_mesh(function), (lhs, sizes, struct(mesh, (groups, n), "float32"), *[rhs] * (2 if gated else 1))


def expert_rows(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """A kernel that moves the rows of experts: `kernel` names it. The shape is T, h, k."""
    import jax
    from jax.sharding import PartitionSpec as P

    from overlap.collectives.rows import chunks, row_kernels
    from overlap.kernels.target import current_target
    from overlap.primitives import PeerGroup

    pretend_processes(case)
    (tokens, features, slots), devices = case.shape, mesh.shape["x"]
    everything, rows = devices * tokens, tokens * slots
    types = {
        "tokens": struct(mesh, (everything, features), case.dtype, P("x")),
        "rows": struct(mesh, (devices * rows, features), case.dtype, P("x")),
        "positions": struct(mesh, (everything, slots), "int32"), "gates": struct(mesh, (everything, slots), "float32"),
    }  # fmt: skip
    kernel, unused = {
        "copied": (row_kernels.copied, {"rows"}), "added": (row_kernels.added, {"tokens"}),
        "products": (row_kernels.products, {"gates"}),
    }[case.config["kernel"]]  # fmt: skip
    given = {name: kind for name, kind in types.items() if name not in unused}
    specs = {name: P("x") if name in ("tokens", "rows") else P() for name in given}

    def call(given: dict[str, jax.Array]) -> Any:
        plan = chunks.RowsPlan(tokens, slots, rows, features, types["rows"].dtype, current_target(), PeerGroup.of("x"))
        return kernel(given, plan)

    return jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P("x"), check_vma=False), (given,)


def expert_layer(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """The MLP of experts, with and without its gradients; its first operation. The shape is T, h, width, experts, k."""
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap
    from overlap.collectives.rows.mlp import expert_mlp

    pretend_processes(case)
    tokens, features, width, experts, slots = case.shape

    def layer(given: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        routing = overlap.route(ids, experts, "x", gates=given["gates"])
        weights = {name: given[name] for name in ("gate", "up", "down")}
        return expert_mlp(given["tokens"], weights, routing, "x", activation=swiglu, implementation="fused")

    def clearing(given: dict[str, jax.Array], ids: jax.Array) -> Any:
        """The first operation by itself: rows that are not in use are zero."""
        product = functools.partial(overlap.all_gather_lhs_grouped_matmul, implementation="fused")
        routing = overlap.route(ids, experts, "x")
        gated = product(given["tokens"], [given["gate"], given["up"]], routing, "x", activation=swiglu)
        return gated, product(given["tokens"], given["gate"], routing, "x")

    def call(given: dict[str, jax.Array], ids: jax.Array) -> Any:
        out, pull = jax.vjp(lambda given: layer(given, ids), given)
        return layer(given, ids), pull(out)[0], clearing(given, ids)

    def of(*shape: int, dtype: str = case.dtype) -> jax.ShapeDtypeStruct:
        return struct(mesh, shape, dtype, P("x"))

    everything = mesh.shape["x"] * tokens
    given = {"tokens": of(everything, features), "gates": of(everything, slots, dtype="float32"),
             "gate": of(experts, features, width), "up": of(experts, features, width),
             "down": of(experts, width, features)}  # fmt: skip
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return mapped, (given, of(everything, slots, dtype="int32"))


def of_operation(op: str) -> str:
    """Returns the name of the function above for an operation of the library."""
    if op in ("matmul", "all_gather_lhs_matmul"):
        return op
    if op.startswith("all_gather_rhs_matmul"):
        return "all_gather_rhs_matmul"
    assert op.startswith(("matmul_reduce_scatter", "matmul_all_reduce")), f"no program assembles {op} yet"
    return "summed"


def linear_cross_entropy(case: Case, mesh: jax.sharding.Mesh) -> Program:
    """The loss of m tokens over n columns of each device; with "cotangent" its gradients.

    "cap": with a soft cap, a bias and padding. "chunk": as in the call; without it the gradients need what is kept.
    """
    import jax

    import overlap

    options = dict(case.config)
    cotangent, cap, transposed = (options.pop(name, False) for name in ("cotangent", "cap", "transposed"))
    chunk = options.pop("chunk", None)
    config = overlap.Config(**options) if options else None
    axis = "x" if mesh.size > 1 else None
    m, n, k = case.shape
    words: dict[str, Any] = {"soft_cap": 30.0, "vocabulary_size": n * mesh.size - 3, "z_loss": 1e-4} if cap else {}

    def loss(x: Any, w: Any, labels: Any, bias: Any) -> Any:
        return overlap.linear_cross_entropy(
            x, w, labels, axis, transpose_w=transposed, bias=bias if cap else None, config=config, chunk=chunk,
            implementation="fused", **words,
        ).sum()  # fmt: skip

    def run(*given: Any) -> Any:
        return jax.grad(loss, (0, 1))(*given) if cotangent else loss(*given)[None]

    columns = n * mesh.size
    shapes = (m, k), (columns, k) if transposed else (k, columns), (m,), (columns,)
    specs = jax.P("x"), jax.P("x") if transposed else jax.P(None, "x"), jax.P("x"), jax.P("x")
    dtypes = case.dtype, case.dtype, "int32", case.dtype
    given = [struct(mesh, *each) for each in zip(shapes, dtypes, specs, strict=True)]
    out_specs = specs[:2] if cotangent else jax.P("x")
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs), tuple(given)
