"""What operations refuse, before anything is traced: the right type, the argument's name, both numbers, and a way out.

Every row of the table is a call of `explain` and a call under `jax.shard_map`. What only the kernel refuses runs by
XLA if nobody asks for the kernel. test_arguments.py has the values that are invalid by themselves, and
single_gpu/test_refusals.py the configurations.
"""

import contextlib
import functools
import operator

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.kernels.operations import BY_NAME
from overlap.kernels.target import Target
from tests.ops.contract import BF16, E4M3, E5M2, F16, F32, H200, SMALL, struct
from tests.ops.explained import answer
from tests.oracle import make_mesh

ALL = tuple(op for op, spec in BY_NAME.items() if not spec.groups)
GATHER, WEIGHTS_N, WEIGHTS_K, SCATTER, COLUMNS, EVERYWHERE = ALL[1:]
COLLECTIVE, SUMS, WEIGHTS = ALL[1:], ALL[4:], (WEIGHTS_N, WEIGHTS_K)
FUSED, ONCE = {"implementation": "fused"}, {"implementation": "fused", "config": SMALL.replace(one_shot=True)}
SPREAD = FUSED | {"config": SMALL}
GROUPED = ("grouped_matmul", "all_gather_lhs_grouped_matmul", "grouped_matmul_reduce_scatter")
V, NI = ValueError, NotImplementedError
X, W = struct(128, 64), struct(64, 256)
SCALE = np.ones


def good(op):
    """Operands of one device, of two."""
    return (struct(128, 128) if op == WEIGHTS_K else X), W


def call_of(op, lhs, rhs, keywords, mesh=None):
    """Returns (function, arguments, keywords) of a call."""
    if op in GROUPED:
        return functools.partial(in_one_group, op), (lhs, rhs), keywords
    axis = () if op == "matmul" else (keywords.get("axis_name", "x"),)
    of_op = dict([BY_NAME[op].keyword]) if BY_NAME[op].keyword else {}
    given = of_op | {name: x for name, x in keywords.items() if name != "axis_name"}
    return getattr(overlap, BY_NAME[op].function), (lhs, rhs, *axis), given


def explain(op, lhs, rhs, devices=2, **keywords):
    function, args, given = call_of(op, lhs, rhs, keywords)
    # The products of experts are recorded beside their rows.
    return overlap.explain(function, *args, **given, mesh=make_mesh(x=devices))[-1 if op == GROUPED[1] else 0]


def trace(op, lhs, rhs, mesh=None, axis_names=None, **keywords):
    """Traces the call inside `shard_map`. Returns the type of the result."""
    is_type = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    valued = lambda x: jnp.zeros(x.shape, x.dtype) if is_type(x) else x  # noqa: E731
    of_all = lambda x: type(x)(map(valued, x)) if isinstance(x, (list, tuple)) else valued(x)  # noqa: E731

    def body():
        function, args, given = call_of(op, of_all(lhs), of_all(rhs), keywords)
        return function(*args, **{name: valued(x) for name, x in given.items()})

    extra = {} if axis_names is None else {"axis_names": axis_names}
    mapped = jax.shard_map(body, mesh=mesh or make_mesh(x=2), in_specs=(), out_specs=P(), check_vma=False, **extra)
    return jax.eval_shape(mapped)


# Operations; lhs and rhs (None: good ones); keywords; the exception's type; what its message must contain.
TABLE = [
    # Operands that do not fit each other, or are none.
    (ALL + GROUPED, None, struct(32, 256), {}, V, ["`lhs`", "`rhs`", "k="]),
    (SUMS, struct(128, 128), None, {}, V, ["k=128", "k=64", "not sharded", "2 devices", "in_specs"]),
    ((WEIGHTS_K,), X, None, {}, V, ["`lhs`", "k=64", "k=128", "2 shards", "`dimension`"]),
    ((WEIGHTS_N,), struct(128, 128), None, {}, V, ["`lhs`", "k=128", "k=64"]),
    (ALL + GROUPED, struct(128, 128, dtype=F16), W, {}, V, ["float16", "bfloat16", "cast"]),
    (GROUPED, struct(128, 256), W, {}, V, ["k=256", "k=64", "`transpose_rhs`"]),
    (("matmul", SCATTER), struct(128, 64, dtype=E4M3), W, {}, V, ["float8_e4m3fn", "bfloat16", "cast"]),
    (("matmul", SCATTER), struct(3, 8, 8), struct(2, 8, 8), {}, V, ["leading dimensions", "(3,)", "(2,)"]),
    (("matmul", *SUMS, *GROUPED), None, [W, W], {}, V, ["list of 2"]),
    ((GATHER, *GROUPED[:2]), None, [], {}, V, ["`rhs`", "at least one matrix", "empty list"]),
    (GROUPED[:2], struct(2, 128, 64), None, {}, V, ["`lhs` must have 2 dimensions, got 3"]),
    ((SCATTER,), struct(127, 64), None, {}, V, ["rows of `lhs`", "m=127", "2 devices", "multiple of 2", "pad"]),
    ((COLUMNS,), None, struct(64, 201), {}, V, ["columns of `rhs`", "n=201", "2 devices"]),
    # Shapes of what is given beside the operands.
    (("matmul", GATHER, *WEIGHTS[1:], SCATTER, EVERYWHERE), None, None, {"bias": struct(3)}, V,
     ["`bias`", "(256,)", "(3,)"]),
    (GROUPED, None, None, {"bias": struct(256)}, V, ["`bias`", "(1, 256)", "(256,)"]),
    (GROUPED[:1], None, None, {"lhs_scale": struct(128)}, V, ["`lhs_scale`", "(128, 1)", "one value per row"]),
    (GROUPED[:1], None, None, {"rhs_scale": struct(1, 1, 1)}, V, ["`rhs_scale`", "(1, 256)"]),
    ((COLUMNS,), None, None, {"bias": struct(256)}, V, ["`bias`", "(128,)", "(256,)"]),
    ((SCATTER,), None, None, {"addend": struct(128, 256)}, V, ["`addend`", "(64, 256)", "(128, 256)"]),
    ((COLUMNS,), None, None, {"addend": struct(128, 256)}, V, ["`addend`", "(128, 128)", "(128, 256)"]),
    ((GATHER,), None, None, {"addend": struct(128, 256)}, V, ["`addend`", "(256, 256)", "(128, 256)"]),
    (("matmul", EVERYWHERE), None, None, {"addend": struct(64, 256)}, V, ["`addend`", "(128, 256)", "(64, 256)"]),
    (ALL, None, None, {"lhs_scale": struct(64, 1)}, V, ["`lhs_scale`", "(128, 1)", "(64, 1)"]),
    ((GATHER,), struct(2, 128, 64), None, {"lhs_scale": SCALE((3, 128, 1))}, V, ["(2, 128, 1)", "(3, 128, 1)"]),
    (("matmul", *COLLECTIVE), None, None, {"rhs_scale": struct(128)}, V, ["`rhs_scale`", "(256,)", "(128,)"]),
    # Several right operands, and several pairs.
    ((GATHER,), None, [W, struct(72, 136)], {}, V, ["`rhs[1]` of 2", "k=64", "k=72"]),
    ((GATHER,), None, (W, struct(64, 136, dtype=F16)), {}, V, ["`rhs[1]`", "bfloat16", "float16", "cast"]),
    ((GATHER,), None, W, {"transpose_rhs": True}, V, ["k=64", "k=256"]),
    ((GATHER,), None, [W, W], {"rhs_scale": SCALE(256)}, V, ["`rhs_scale`", "list", "one entry per matrix", "(256,)"]),
    ((GATHER,), None, (W, W), {"rhs_scale": (1.0,) * 3}, V, ["`rhs_scale`", "2 entries", "tuple of 3"]),
    ((GATHER,), None, [W, struct(64, 136)], {"rhs_scale": [1.0, SCALE(256)]}, V,
     ["`rhs_scale[1]`", "(136,)", "(256,)"]),
    ((GATHER,), None, [W, W], {"rhs_scale": [None, 1.0]}, V, ["`rhs_scale[0]`", "a real number", "None"]),
    ((GATHER,), None, W, {"rhs_scale": [1.0]}, V, ["`rhs_scale`", "list only if `rhs` is", "list of 1"]),
    (SUMS[::2], [X, X], W, {}, V, ["lists of equal length", "list of 2", "one array"]),
    (SUMS[::2], [X, X], [W], {}, V, ["list of 2", "list of 1"]),
    (SUMS[::2], [], [], {}, V, ["list of 0"]),
    (SUMS[::2], [X, X], [W, struct(32, 256)], {}, V, ["pair 1 of 2", "k=64", "k=32"]),
    (SUMS[::2], [X, struct(64, 64)], [W, W], {}, V, ["`lhs`", "rows", "(64, 64)", "lhs[1]", "only k"]),
    (SUMS[::2], [X, X], [W, struct(64, 128)], {}, V, ["`rhs`", "columns", "(64, 128)", "rhs[1]"]),
    (SUMS[::2], [X, struct(2, 128, 64)], [W, W], {}, V, ["leading dimensions", "(2, 128, 64)"]),
    (SUMS[::2], [X, struct(128, 64, dtype=F16)], [W, struct(64, 256, dtype=F16)], {}, V, ["dtype", "float16"]),
    (SUMS[::2], [X, 1], [W, W], {}, V, ["lhs[1]", "array", "int"]),
    ((GATHER,), [X, X], [W, W], {}, V, ["`lhs`", "one array", "list of 2", "`matmul_reduce_sc"]),
    (SUMS, None, None, FUSED | {"config": overlap.Config(cluster=2)}, V, ["`cluster`", "`stream_k`", "2 and 1"]),
    (GROUPED[:1], None, None, FUSED | {"config": overlap.Config(stream_k=2)}, V, ["got 1, 2 and 1"]),
    # Beside the mainloop's shared memory lies a box of zeros.
    (GROUPED[:1], None, None,
     FUSED | {"config": overlap.Config(stages=7, tile_n=128), "preferred_element_type": F32}, V,
     ["needs 264312 bytes of shared memory"]),
    (("matmul", GATHER, *GROUPED[:2]), None, None, {"activation": lambda gate, up: gate * up}, V,
     ["`activation`", "takes 2", "jnp.split(weights, 2, axis=-1)", "pass the list"]),
    ((GATHER,), None, [W, W], {"activation": lambda *a: a[0] * a[1]}, V,
     ["`activation`", "by its parameters how many", "any number", "fails for 1", "name them"]),
    ((GATHER,), None, [W, W], {"activation": lambda *a: operator.mul(*a)}, V, ["any number", "fails for 1 (TypeError"]),
    # What the kernel does not serve, and XLA does.
    (COLLECTIVE, None, struct(1, 64, 256), FUSED, NI, ["`rhs`", "leading", "(1,)", "xla"]),
    ((GATHER,), None, [W, struct(2, 64, 136)], FUSED, NI, ["`rhs[1]`", "leading dimensions", "(2,)", "xla"]),
    ((GATHER,), None, [W, struct(64, 201)], FUSED, NI, ["`rhs[1]`", "n=201", "16 bytes", "multiple of 8", "xla"]),
    (("matmul", GATHER, WEIGHTS_N, SCATTER, EVERYWHERE), None, struct(64, 201), FUSED, NI,
     ["n=201", "16 bytes", "xla"]),
    (("matmul", GATHER, WEIGHTS_N, SCATTER, EVERYWHERE), struct(128, 97), struct(97, 256), FUSED, NI,
     ["k=97", "16 bytes", "xla"]),
    (GROUPED[::2], None, struct(64, 201), FUSED, NI, ["multiples of 16", "xla"]),
    (GROUPED[:1], struct(128, 64, dtype=E5M2), struct(64, 256, dtype=E5M2), FUSED, NI, ["[groups, n, k] only", "pass"]),
    (GROUPED[:1], None, [W] * 3, FUSED | {"activation": lambda a, b, c: a * b + c}, NI,
     ["at most two right operands, got 3: make several calls"]),
    (GROUPED[:1], None, None, FUSED | {"activation": jax.nn.softmax}, NI, ["cannot take this `activation`"]),
    ((WEIGHTS_K,), struct(128, 24), struct(12, 256), FUSED, NI, ["k_shard=12", "multiple of 8", "xla"]),
    ((COLUMNS,), None, struct(64, 24), FUSED, NI, ["device's part of rhs", "n / 2=12", "16 bytes"]),
    ((SCATTER,), struct(64, 24), struct(64, 8), FUSED | {"transpose_lhs": True}, NI, ["part of lhs", "m / 2=12"]),
    ((SCATTER,), [X, struct(128, 60)], [W, struct(60, 256)], FUSED, NI, ["k=60"]),
    ((GATHER,), struct(0, 64), None, FUSED, NI, ["m_shard=0", "at least 1", "xla"]),
    (("matmul", WEIGHTS_N, SCATTER), struct(0, 64), None, FUSED, NI, ["=0", "at least 1", "xla"]),
    ((GATHER, SCATTER, EVERYWHERE), struct(0, 8, 8), struct(8, 16), FUSED, NI, ["at least 1", "(0,)"]),
    (ALL + GROUPED, struct(8, 16, dtype=F32), None, FUSED, NI, ["float32", "xla"]),
    ((GATHER, *WEIGHTS), None, None, FUSED | {"preferred_element_type": F32}, NI, ["float32", "xla"]),
    ((GATHER,), None, None, FUSED | {"preferred_element_type": F32, "transport": "ring"}, NI, ["writes", "float32"]),
    ((GATHER, SCATTER, EVERYWHERE), struct(128, 64, dtype=E4M3), struct(64, 256, dtype=E4M3), ONCE, NI,
     ["8-bit", "transpose_rhs=True", "xla"]),
    ((GATHER,), struct(128, 64, dtype=E4M3), [struct(256, 64, dtype=E4M3), struct(256, 64, dtype=E5M2)],
     FUSED | {"transpose_rhs": True}, NI, ["`rhs`", "same dtype", "e4m3fn", "e5m2"]),
    ((GATHER,), struct(128, 72, dtype=E4M3), struct(256, 72, dtype=E4M3), FUSED | {"transpose_rhs": True}, NI,
     ["k=72", "16 bytes"]),
    # Keywords that no kernel of the operation takes.
    ((GATHER,), None, None, FUSED | {"addend": struct(256, 256)}, NI, ["`addend`", "xla"]),
    ((WEIGHTS_K,), None, None, FUSED | {"bias": SCALE(256)}, NI, ["`bias`", "xla"]),
    (WEIGHTS, None, None, FUSED | {"activation": jax.nn.relu}, NI, ["`activation`", "xla"]),
    (WEIGHTS, None, None, FUSED | {"lhs_scale": SCALE((128, 1))}, NI, ["`lhs_scale`", "xla"]),
    (WEIGHTS, None, None, FUSED | {"rhs_scale": 2.0}, NI, ["`rhs_scale`", "xla"]),
    ((WEIGHTS_K,), None, None, FUSED | {"addend": SCALE((128, 256))}, NI, ["`addend`", "xla"]),
    ((GATHER,), struct(64, 128), None, FUSED | {"transpose_lhs": True}, NI, ["`transpose_lhs`", "xla"]),
    ((WEIGHTS_K,), X, struct(256, 64), FUSED | {"transpose_rhs": True}, NI, ["`transpose_rhs`", "xla"]),
    # Neither rows nor columns can be cut equally among the devices.
    ((EVERYWHERE,), struct(127, 64), struct(64, 200), SPREAD, NI, ["m=127", "n=200", "of 2", "16", "one_shot=True"]),
    ((EVERYWHERE,), struct(64, 24), struct(64, 200), SPREAD | {"transpose_lhs": True}, NI, ["m=24", "of 16 or n"]),
]  # fmt: skip
ROWS = [
    pytest.param(op, *row, id=f"{op} {i}") for i, (ops, *row) in enumerate(TABLE) for op in ops
]  # fmt: skip


@pytest.mark.one_jax
@pytest.mark.parametrize(("op", "lhs", "rhs", "keywords", "error", "fragments"), ROWS)
def test_refused(op, lhs, rhs, keywords, error, fragments):
    operands = [good(op)[i] if x is None else x for i, x in enumerate((lhs, rhs))]
    if "float32" in fragments and rhs is None and lhs is not None:
        operands = struct(8, 32 if op == WEIGHTS_K else 16, dtype=F32), struct(16, 32, dtype=F32)
    for call in (explain, trace):
        with pytest.raises(error) as caught:
            call(op, *operands, **keywords)
        assert type(caught.value) is error
        for fragment in fragments:
            assert fragment in str(caught.value), str(caught.value)
    if error is NI:
        given = {name: x for name, x in keywords.items() if name not in ("implementation", "config")}
        assert jax.tree.leaves(trace(op, *operands, **given))[0].ndim >= 2
        assert explain(op, *operands, **given).implementation == "xla"


@pytest.mark.parametrize("op", COLLECTIVE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_outside_shard_map(op):
    lhs, rhs = (jnp.zeros(x.shape, x.dtype) for x in good(op))
    no_mesh, no_axis = r"there is no mesh here \(`with mesh:` is not read\)", r"no axis of the mesh is manual here"
    here = [(contextlib.nullcontext, no_mesh), (lambda: make_mesh(x=2), no_mesh),
            (lambda: jax.set_mesh(make_mesh(x=2)), rf"{no_axis} \(`jax.set_mesh` alone makes none man")]  # fmt: skip
    function, args, given = call_of(op, lhs, rhs, {})
    for context, why in here:
        # The call in the message has all arguments that are needed.
        message = f"`{function.__name__}` must be called inside `jax.shard_map`, and {why}.*: wrap the call.*"
        with context(), pytest.raises(ValueError, match=rf"{message}overlap.{function.__name__}\(") as caught:
            function(*args, **given)
        assert ("dimension=…" in str(caught.value)) == (op in WEIGHTS)


def test_some_axes_that_are_not_manual():
    mesh = make_mesh(x=2, y=2)
    with pytest.raises(NotImplementedError, match=r"manual.*'y'"):
        trace(GATHER, X, W, mesh, {"x"}, **FUSED)
    with pytest.raises(ValueError, match=r"`all_gather_lhs_matmul`.*'y'.*\('x',\).*axis_names"):
        trace(GATHER, X, W, mesh, {"x"}, axis_name=("x", "y"))
    for axis, fragments in ((("x", "z"), "'z'.*"), ("z", "'z'.*"), ((), "at least one.*")):
        with pytest.raises(ValueError, match=f"`axis_name`.*{fragments}"):
            trace(GATHER, X, W, mesh, axis_name=axis)
    with pytest.raises(ValueError, match=r"inside `jax.shard_map`.*\('a', 'b'\)"):
        answer(overlap.all_gather_lhs_matmul, X, W, ("a", "b"))


# --- Configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*ALL, "sharded_matmul", *GROUPED])
def test_a_configuration_is_checked_first_even_if_xla_runs(op):
    """Before the activation is called, too."""

    def activation(values):
        raise AssertionError("called")

    def explained(config, **more):
        if op == "sharded_matmul":
            with jax.set_mesh(make_mesh(x=2)):
                return answer(overlap.sharded_matmul, X, W, **SHARDED, **more, config=config)
        return explain(op, *good(op), **more, config=config)

    takes_activation = {"activation": activation} if op in ("matmul", *SUMS, *GROUPED[:2]) else {}
    for implementation in (None, "fused", "xla"):
        for config in (overlap.Config(tile_n=96), {"tile_n": 128}):
            with pytest.raises(ValueError, match=r"`(tile_n|config)` must be"):
                explained(config, implementation=implementation, **takes_activation)
    by_xla = dict(implementation="xla")
    assert explained(overlap.Config(tile_n=128), **by_xla) == explained(None, **by_xla)


@pytest.mark.parametrize("name", ["implementation", "config"])
def test_matmul_checks_it_where_the_types_of_its_operands_exclude_a_kernel(name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    lhs, rhs = (
        jax.device_put(jnp.ones(shape, BF16), jax.NamedSharding(mesh, spec))
        for shape, spec in (((8, 16), P(None, "x")), ((16, 8), P()))
    )
    for refused in (overlap.matmul, lambda *a, **b: overlap.explain(overlap.matmul, *a, **b)):
        with pytest.raises(ValueError, match=f"`{name}` must be None or "):
            refused(lhs, rhs, **{name: "zz"})


# --- Where operands lie, and sizes that are symbols -------------------------------------------------------------------

SIZES = (6, 64), (64, 256)
SHARDED = {"lhs_sharding": P("x"), "rhs_sharding": P(None, "x"), "out_sharding": P(None, "x")}


def on_devices(op, **keywords):
    """Returns (call of two whole matrices, the sharding of a whole matrix on the devices that compute it)."""
    mesh = make_mesh(x=1 if op in ("matmul", *GROUPED) else 2)
    if op in GROUPED:
        return functools.partial(in_one_group, op, **keywords), jax.NamedSharding(mesh, P())
    if op == "sharded_matmul":
        return (lambda *x: overlap.sharded_matmul(*x, **SHARDED, mesh=mesh, **keywords)), jax.NamedSharding(mesh, P())
    function, (_, _, *axis), given = call_of(op, None, None, keywords)
    call = lambda lhs, rhs: function(lhs, rhs, *axis, **given)  # noqa: E731
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return mapped if axis else call, jax.NamedSharding(mesh, P())


def in_one_group(op, lhs, rhs, **keywords):
    """Returns the product of one group, to which all rows belong. Gates are the first column of `lhs`."""
    rhs = jax.tree.map(lambda x: x[None], rhs)
    if op == "grouped_matmul":
        return overlap.grouped_matmul(lhs, rhs, jnp.array([128]), **keywords)
    gates = [lhs[:, :1]] if op == GROUPED[2] else []
    routing = overlap.route(jnp.zeros((lhs.shape[0], 1), int), 1, None)
    return getattr(overlap, op)(lhs, rhs, *gates, routing, None, **keywords)


MEMORY_OPS = ("matmul", GATHER, "sharded_matmul", *GROUPED)


@pytest.mark.parametrize("op", MEMORY_OPS)
def test_sizes_that_are_symbols(op):
    (rows,) = jax.export.symbolic_shape("2*b")
    types = struct(rows, 64), struct(64, 256)
    exported = jax.export.export(jax.jit(on_devices(op)[0]))(*types)
    if op in (
        "matmul",
        *GROUPED[:2],
    ):  # (jax 0.11 and 0.12 do not run a program that gathers or scatters along a symbol.)
        lhs, rhs = (jnp.arange(np.prod(shape)).reshape(shape).astype(BF16) % 8 for shape in SIZES)
        np.testing.assert_array_equal(exported.call(lhs, rhs), lhs @ rhs)
    if op in ("matmul", GROUPED[0]):  # There may be no rows.
        assert jax.eval_shape(on_devices(op, config=SMALL)[0], struct(rows - 2, 64), W).shape == (rows - 2, 256)
    with pytest.raises(NotImplementedError, match=r"sizes that are numbers, got `\w+` of shape \(.*b, 64\): export a"):
        jax.eval_shape(on_devices(op, implementation="fused")[0], *types)


def test_vmap_over_a_number_that_is_a_symbol(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    types = struct(*jax.export.symbolic_shape("b"), 128, 64), struct(64, 256)
    of = lambda which: jax.vmap(on_devices("matmul", implementation=which, config=overlap.Config())[0], (0, None))  # noqa: E731
    assert "overlap_operation" not in str(jax.make_jaxpr(of(None))(*types))
    with pytest.raises(NotImplementedError, match=r"sizes that are numbers, got `jax\.vmap` over b elements"):
        jax.eval_shape(of("fused"), *types)


@pytest.mark.parametrize("implementation", [None, "fused"])
@pytest.mark.parametrize("op", MEMORY_OPS)
def test_operands_in_host_memory(op, implementation):
    """XLA multiplies operands that are all in host memory, but no kernel does; nobody multiplies across memories."""
    call, whole = on_devices(op, implementation=implementation)
    of_device = [jax.device_put(jnp.zeros(shape, BF16), whole) for shape in SIZES]
    of_host = [jax.device_put(x, whole.with_memory_kind("pinned_host")) for x in of_device]
    for run in (call, jax.jit(call)):
        with pytest.raises(ValueError, match=r"^`lhs` and `rhs` .* got device and host: .*device_put\(rhs,"):
            run(of_device[0], of_host[1])
        with pytest.raises(ValueError, match=r"got host and device: move one of them first, .*device_put\(lhs,"):
            run(of_host[0], of_device[1])
    if implementation == "fused":
        with pytest.raises(
            NotImplementedError, match="the fused kernel reads device memory, got operands in host memo"
        ):
            call(*of_host)
    else:
        assert jax.eval_shape(call, *of_host).shape == jax.eval_shape(call, *of_device).shape
        if op == "grouped_matmul":
            assert jax.memory.Space.Host == jax.typeof(call(*of_host)).memory_space


def test_operands_on_different_devices_are_refused():
    lhs = jax.device_put(jnp.ones((48, 32), BF16), jax.devices()[1])
    free = np.ones((32, 16), BF16)  # Not put anywhere, so it may move.
    rhs = jax.device_put(free, jax.devices()[0])
    product = lambda lhs, rhs: overlap.matmul(lhs, rhs, config=SMALL, implementation="fused")  # noqa: E731
    with overlap.emulation.emulate(cores=2):
        refusal = r"`rhs` must be on the same devices as `lhs` \(.*1\), got \(.*0\): move"
        mapped, loss = jax.vmap(product), lambda lhs, rhs: product(lhs, rhs).sum()
        by_xla = functools.partial(overlap.matmul, implementation="xla")
        for call in (product, by_xla, lambda lhs, rhs: mapped(lhs[None], rhs[None]), jax.grad(loss)):
            with pytest.raises(ValueError, match=refusal):
                call(lhs, rhs)
        assert product(lhs, free).devices() == {jax.devices()[1]}
        for op in GROUPED:
            call = on_devices(op)[0]
            with pytest.raises(ValueError, match=refusal):
                call(lhs, rhs)
        # As constants of a compiled program they may lie anywhere, as in `lhs @ rhs`.
        np.testing.assert_array_equal(jax.jit(lambda: product(lhs, rhs))(), product(lhs, free))


@pytest.mark.parametrize(
    ("target", "fragment"),
    [
        (Target("gpu", "NVIDIA A100-SXM4-80GB", 108), "Hopper"),
        (Target("gpu", "NVIDIA GeForce RTX 5090", 170), "a Hopper or a Blackwell GPU"),
        (Target("tpu", "TPU v5", 1), "tpu"),
    ],
)
def test_devices_without_a_kernel(monkeypatch, target, fragment):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target)
    for op in ALL + GROUPED[::2]:
        with pytest.raises(NotImplementedError, match=fragment):
            trace(op, *good(op), **FUSED)
        choice = explain(op, *good(op))
        assert choice.implementation == "xla" and fragment in choice.reason
