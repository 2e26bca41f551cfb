"""Tests valid and invalid arguments of all public functions: the message of each refusal names the invalid argument.

This file states independently what is valid: values that are valid or invalid by themselves, and sizes that must agree.
Nothing is compiled: `explain` and `jax.eval_shape` end before that.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

M, K, N = 8, 16, 24
MESH = make_mesh(x=2)
BF16 = jnp.bfloat16


class Shaped:
    """An array type of another library."""

    shape, dtype = (M, K), np.dtype("float32")


def array(*shape, dtype=BF16):
    return np.zeros(shape, dtype), jnp.zeros(shape, dtype), jax.ShapeDtypeStruct(shape, dtype)


def wrong_array(*shape):
    dtypes = (jnp.int8, bool, jnp.complex64)
    return [
        None, [1.0, 2.0], [[1.0]], "abc", 3, 1.5, object(), Shaped(), np.zeros(shape, object), np.zeros(shape, "U1"),
        *(x for dtype in dtypes for x in array(*shape, dtype=dtype)), *array(3, dtype=BF16), *array(dtype=BF16),
        jax.random.split(jax.random.key(0), 4),
    ]  # fmt: skip


FLAG = [True, False, np.True_], ["no", 0, 1, None, [], 1.0, np.array([True, False]), jnp.ones(())]
NAMES = ["nonsense", 1, True, [], b"xla", ("xla",), np.zeros(3), "XLA"]
CONFIG = [None, overlap.Config(), overlap.Config(tile_n=128)], ["x", 3, {}, overlap.Config, object(), np.zeros(3)]
IMPLEMENTATION = [None, "xla", "fused"], NAMES
DTYPE = [None, jnp.float32, "bfloat16", np.dtype(np.float16), jnp.float8_e5m2], [
    "float99", "int8", jnp.int8, jnp.complex64, bool, "bool", 3, [], object(), jnp.float64, "",
]  # fmt: skip
ACTIVATION = [None, jax.nn.relu, jnp.tanh, lambda y: y * 2, jax.nn.softmax], [
    "relu", 3, lambda: 0, lambda y: y.T, lambda y: (y, y), lambda y: None, lambda y: jnp.float32(0), lambda y: y * 1j,
    np.zeros(3), [jnp.tanh],
]  # fmt: skip
AXIS = (
    ["x", ("x",), ["x"]],
    ["y", None, 3, (), [], ("x", "x"), np.zeros(2), {"x"}, ("x", "y"), b"x", (None,), jnp.ones(2)],
)
REAL = [1.0, 2, np.float32(3), np.float64(0.5), np.int32(2), *array(dtype=np.float32), *array(1), *array(1, 1)]
UNREAL = [
    "2", True, np.True_, 1j, object(), np.zeros((), complex), np.zeros(N, bool), *array(3), *array(M, N), "", {}, b"2",
    [1.0], (2.0,), (), (None,), [2.0, 3.0, 4.0], (2.0, "2", 3.0),
]  # fmt: skip
ROWS, COLUMNS = array(M, 1, dtype=np.float32), [*array(N, dtype=np.float32), *array(1, N, dtype=np.float32)]
LHS_SCALE = [None, *REAL, *ROWS], [*UNREAL, *COLUMNS, *array(M, dtype=np.float32)]
RHS_SCALE = [None, *REAL, *COLUMNS], [*UNREAL, *ROWS, *array(N, 1)]
COMMON = {"config": CONFIG, "implementation": IMPLEMENTATION, "preferred_element_type": DTYPE, "mesh": (
    [MESH], ["x", 3, {}, P("x"), [MESH]],
)}  # fmt: skip
OPERANDS = {"lhs": (array(M, K), wrong_array(M, K)), "rhs": (array(K, N), wrong_array(K, N))}

OF_GROUPS = array(2, K, N), [*wrong_array(2, K, N), *array(K, N), *array(3, K, N), []]
ROUTING = [overlap.route(jnp.zeros((M, 1), jnp.int32), 2, None)]
NO_ROUTING = [None, 3, "x", np.zeros((M, 1), np.int32), (), object(), jnp.zeros((M, 1), jnp.int32)]
NO_AXIS = [None], [3, (), [], ("x", "x"), np.zeros(2), {"x"}, (None,), jnp.ones(2)]

# For each operation: the required arguments, the optional ones, and valid and invalid values of each.
OPERATIONS = {
    overlap.matmul: (OPERANDS, COMMON | {
        "addend": ([None, *array(M, N), *array(M, N, dtype=np.float32)], wrong_array(M, N)[1:]),
        "bias": ([None, *array(N), *array(N, dtype=np.float32)], [*wrong_array(N)[1:], *array(M), *array(1, N)]),
        "activation": ACTIVATION, "lhs_scale": LHS_SCALE, "rhs_scale": RHS_SCALE,
        "transpose_lhs": ([False], FLAG[1]), "transpose_rhs": ([False], FLAG[1]),
    }),
    overlap.all_gather_lhs_matmul: (OPERANDS | {"axis_name": AXIS, "mesh": COMMON["mesh"]}, COMMON | {
        "rhs": (
            [*array(K, N), [array(K, N)[0], array(K, 2 * N)[1]]],
            [*wrong_array(K, N), [], (), [None], ["abc"], (array(K, N)[0], array(M, N)[0])],
        ),
        "lhs_scale": LHS_SCALE, "rhs_scale": ([None, *REAL], [*UNREAL, *ROWS]),
        "transpose_rhs": ([False], FLAG[1]), "return_gathered": FLAG,
        "transport": ([None, "pull", "ring"], [*NAMES, "push"]),
    }),
    overlap.all_gather_rhs_matmul: (
        OPERANDS | {
            "axis_name": AXIS, "mesh": COMMON["mesh"],
            "dimension": ([1, np.int64(1)], [2, -1, True, None, "0", 1.0, [0], np.zeros(2)]),
        },
        COMMON,
    ),
    overlap.matmul_reduce_scatter: (
        OPERANDS | {"axis_name": AXIS, "mesh": COMMON["mesh"]},
        COMMON | {
            "bias": ([None, *array(N)], wrong_array(N)[1:]), "activation": ACTIVATION,
            "lhs_scale": LHS_SCALE, "rhs_scale": RHS_SCALE, "transpose_rhs": ([False], FLAG[1]),
            "dimension": ([0, np.int64(0)], [2, -1, True, None, "0", 1.0, [0], np.zeros(2)]),
            "transport": ([None, "push", "ring"], [*NAMES, "pull"]),
        },
    ),
    overlap.matmul_all_reduce: (
        OPERANDS | {"axis_name": AXIS, "mesh": COMMON["mesh"]},
        COMMON | {
            "addend": ([None, *array(M, N)], wrong_array(M, N)[1:]),
            "bias": ([None, *array(N)], wrong_array(N)[1:]), "activation": ACTIVATION,
            "lhs_scale": LHS_SCALE, "rhs_scale": RHS_SCALE, "transpose_rhs": ([False], FLAG[1]),
        },
    ),
    overlap.grouped_matmul: (
        {"lhs": OPERANDS["lhs"], "rhs": OF_GROUPS, "group_sizes": (
            [np.array([3, 4]), jnp.array([3, 4], jnp.int8), jax.ShapeDtypeStruct((2,), jnp.int32)],
            [None, [3, 4], "ab", 3, np.ones(2), jnp.ones((2, 1), int), jnp.ones((), int), np.ones(2, bool), object()],
        )},
        COMMON | {
            "bias": ([None, *array(2, N)], [*wrong_array(2, N)[1:], *array(N), *array(3, N)]), "activation": ACTIVATION,
            "lhs_scale": LHS_SCALE, "rhs_scale": ([None, *REAL, *array(2, N)], [*UNREAL, *array(N), *array(2, 1)]),
            "transpose_rhs": ([False], FLAG[1]),
        },
    ),
    overlap.all_gather_lhs_grouped_matmul: (
        {"lhs": OPERANDS["lhs"], "rhs": OF_GROUPS, "routing": (ROUTING, NO_ROUTING), "axis_name": NO_AXIS},
        COMMON | {
            "bias": ([None, *array(2, N)], [*wrong_array(2, N)[1:], *array(N), *array(3, N)]), "activation": ACTIVATION,
            "transpose_rhs": ([False], FLAG[1]),
        },
    ),
    overlap.grouped_matmul_reduce_scatter: (
        {"lhs": OPERANDS["lhs"], "rhs": OF_GROUPS, "routing": (ROUTING, NO_ROUTING), "axis_name": NO_AXIS,
         "gates": (array(M, 1, dtype=np.float32), wrong_array(M, 1))},
        COMMON | {
            "bias": ([None, *array(2, N)], [*wrong_array(2, N)[1:], *array(N), *array(3, N)]),
            "transpose_rhs": ([False], FLAG[1]),
        },
    ),
}  # fmt: skip


def call_of(op, arguments):
    """Calls the operation under tracing; nothing runs."""
    arguments = {name: value for name, value in arguments.items() if name != "mesh"}
    valued = lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x  # noqa: E731
    arguments = jax.tree.map(valued, arguments, is_leaf=lambda x: isinstance(x, (list, tuple)) and not x)
    if "axis_name" not in arguments or "grouped" in op.__name__:
        return jax.eval_shape(lambda: op(**arguments))
    mapped = jax.shard_map(lambda: op(**arguments), mesh=MESH, in_specs=(), out_specs=P(), check_vma=False)
    return jax.eval_shape(mapped)


def outcome(call):
    try:
        return call(), None
    except Exception as error:
        return None, error


@st.composite
def calls(draw):
    """Draws an operation, its arguments, and the names of the invalid ones."""
    op = draw(st.sampled_from(list(OPERATIONS)))
    needed, possible = OPERATIONS[op]
    chosen = list(needed) + draw(st.lists(st.sampled_from(list(possible)), unique=True, max_size=4))
    spoiled = draw(st.lists(st.sampled_from(chosen), unique=True, max_size=2))
    arguments = {}
    for name in chosen:
        right, wrong = possible.get(name, needed.get(name))
        arguments[name] = draw(st.sampled_from(list(wrong if name in spoiled else right)))
    if "mesh" not in needed and isinstance(arguments.get("mesh"), jax.sharding.Mesh) and draw(st.booleans()):
        del arguments["mesh"]
    return op, arguments, set(spoiled)


def judge(op, arguments, wrong, *, traces):
    """Calls the operation or `explain`. Only arguments in `wrong` may be refused, and the message must name them."""
    if traces and "mesh" not in wrong:
        _, error = outcome(lambda: call_of(op, arguments))
    else:
        _, error = outcome(lambda: overlap.explain(op, **arguments))
    if wrong:
        assert type(error) is ValueError, (op, wrong, {x: arguments[x] for x in wrong}, error)
        named = {name for name in (*inspect.signature(op).parameters, "mesh") if f"`{name}" in str(error)}
        # If two operands do not fit each other, the message may name either one.
        assert named & wrong or (named and wrong & {"lhs", "rhs"}), (wrong, str(error))
        assert len(str(error)) < 700, str(error)
    elif error is not None:
        assert type(error) is NotImplementedError and arguments.get("implementation") == "fused", (arguments, error)
        assert "`" in str(error) or "xla" in str(error)


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.__name__)
def test_each_wrong_value_by_itself(op):
    needed, possible = OPERATIONS[op]
    right = {name: values[0] for name, (values, _) in needed.items()}
    for name, (_, wrong) in (needed | possible).items():
        # What operations check alike is tested in full with one of them.
        is_shared = name in OPERATIONS[overlap.matmul][0] | OPERATIONS[overlap.matmul][1]
        for value in wrong[::4] if is_shared and op is not overlap.matmul else wrong:
            judge(op, right | {name: value}, {name}, traces=False)


@pytest.mark.one_jax
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls(), st.booleans())
def test_right_and_wrong_ones_together(drawn, traces):
    op, arguments, wrong = drawn
    judge(op, arguments, wrong, traces=traces)


def test_explain_of_no_function():
    with pytest.raises(ValueError, match="`fn` must be a function"):
        overlap.explain("matmul", *array(M, K)[:2])


def test_types_are_for_explain():
    for op, (needed, _) in OPERATIONS.items():
        arguments = {name: right[0] for name, (right, _) in needed.items() if name != "mesh"}
        with pytest.raises(ValueError, match=r"`rhs` must be an array, got a jax.ShapeDtypeStruct.*explain"):
            op(**arguments | {"rhs": jax.ShapeDtypeStruct((K, N), BF16)})


@pytest.mark.one_jax
@pytest.mark.parametrize("name", [*vars(overlap.Config())])
def test_values_of_configurations(name):
    words = {"order_minor": ("m", "n"), "cluster_along": ("m", "k"), "schedule": ("cooperative", "pingpong")}
    flags = ("swap_operands", "joined", "one_shot")
    for value in (1, 64, np.int64(64), np.uint8(3), 0, -1, True, False, np.True_, 1.0, np.float64(64), "m", "n", "k",
                  "pingpong", "Pingpong", None, [], np.zeros(2), (1,), 2**70):  # fmt: skip
        if name in words:
            right = isinstance(value, str) and value in words[name]
        elif name in flags:
            right = isinstance(value, bool)
        else:
            right = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0
        config, error = outcome(lambda value=value: overlap.Config(**{name: value}))
        assert (config is not None) == right, value
        assert right or (type(error) is ValueError and f"`{name}` must be" in str(error) and "got" in str(error))
    assert repr(overlap.Config(tile_m=np.int64(64))) == repr(overlap.Config(tile_m=64))


@pytest.mark.parametrize(
    ("name", "value"),
    [("fn", 3), ("max_configs", 0), ("max_configs", "3"), ("max_configs", True), ("budget_s", "1"), ("budget_s", -1),
     ("budget_s", float("nan")), ("path", 3), ("save", "no"), ("force", 1), ("progress", 3)],
)  # fmt: skip
def test_autotune(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        overlap.autotune(**{"fn": lambda: None} | {name: value})


@pytest.mark.parametrize("op", [overlap.matmul, overlap.all_gather_lhs_matmul, overlap.matmul_reduce_scatter])
def test_sizes_of_zero(op):
    """XLA runs, with every keyword."""
    axis = {} if op is overlap.matmul else {"axis_name": "x"}
    more = {"bias": np.ones(N, np.float32), "activation": jax.nn.relu, "lhs_scale": 2.0}
    for m, k, n in ((0, K, N), (M, 0, N), (M, K, 0), (0, 0, 0)):
        given = {"lhs": np.ones((m, k), BF16), "rhs": np.ones((k, n), BF16), "bias": np.ones(n, np.float32)}
        assert call_of(op, more | given | axis) is not None
    if op is overlap.matmul:
        np.testing.assert_array_equal(op(np.ones((M, 0), BF16), np.ones((0, N), BF16), bias=jnp.ones(N)), 1)
