"""Products summed over devices: invalid calls, `explain` of valid ones, and the choices."""

import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice import crossover, dispatch
from overlap.choice.problem import Problem
from overlap.kernels.target import Target
from tests.explained import answer
from tests.oracle import make_mesh
from tests.scatter_cases import BF16, EVERYWHERE, F16, F32, SMALL, Layer, struct, trace

H200 = Target("gpu", "NVIDIA H200", 132)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FUSED = {"implementation": "fused"}


# --- Errors and choices -----------------------------------------------------------------------------------------------


GOOD, COLUMNS = (struct(128, 64), struct(64, 256)), {"dimension": 1}
OF_8_BITS = struct(128, 64, dtype=E4M3), struct(64, 256, dtype=E4M3)
WRONG_CALLS = [  # arguments, keywords, type, what the message must contain
    (GOOD, {"dimension": 2}, ValueError, ["`dimension`", "0", "1", "got 2"]),
    (GOOD, {"dimension": -1}, ValueError, ["`dimension`", "got -1"]),
    (GOOD, {"dimension": True}, ValueError, ["`dimension`", "True"]),
    (GOOD, {"dimension": None}, ValueError, ["`dimension`", "None"]),
    ((struct(127, 64), struct(64, 256)), {}, ValueError, ["rows of `lhs`", "m=127", "2 devices", "multiple of 2"]),
    ((struct(128, 64), struct(64, 201)), COLUMNS, ValueError, ["columns of `rhs`", "n=201", "2 devices"]),
    ((struct(127, 64), struct(64, 256)), FUSED, ValueError, ["m=127", "2 devices", "pad"]),
    ((struct(128, 64), struct(32, 256)), {}, ValueError, ["`lhs`", "`rhs`", "k=64", "k=32"]),
    ((struct(128), struct(64, 256)), {}, ValueError, ["`lhs`", "2 dimensions", "got 1"]),
    (([1], struct(64, 256)), {}, ValueError, ["`lhs`", "array", "list"]),
    ((struct(128, 64, dtype=F16), struct(64, 256)), {}, ValueError, ["float16", "bfloat16", "cast"]),
    ((struct(8, 8, dtype=jnp.int8), struct(8, 8, dtype=jnp.int8)), {}, ValueError, ["floating-point", "int8"]),
    ((struct(3, 8, 8), struct(2, 8, 8)), {}, ValueError, ["leading dimensions", "(3,)", "(2,)"]),
    (
        (GOOD[0], [np.zeros((64, 256))] * 2),
        {},
        ValueError,
        ["`lhs` and `rhs`", "one array", "list of 2", "give each matrix"],
    ),
    ((struct(128, 128), GOOD[1]), {}, ValueError, ["k=128", "k=64", "not sharded", "2 devices", "in_specs"]),
    (GOOD, {"axis_name": "y"}, ValueError, ["`axis_name`", "'y'", "('x',)"]),
    (GOOD, {"axis_name": ("x", "x")}, ValueError, ["`axis_name`", "once", "('x', 'x')"]),
    (GOOD, {"implementation": "nccl"}, ValueError, ["`implementation`", "'nccl'"]),
    (GOOD, {"bias": struct(128)}, ValueError, ["`bias`", "(256,)", "(128,)"]),
    (GOOD, COLUMNS | {"bias": struct(256)}, ValueError, ["`bias`", "(128,)", "(256,)"]),
    (GOOD, {"addend": struct(128, 256)}, ValueError, ["`addend`", "(64, 256)", "(128, 256)"]),
    (GOOD, {"lhs_scale": struct(64, 1)}, ValueError, ["`lhs_scale`", "(128, 1)", "(64, 1)"]),
    (GOOD, COLUMNS | {"rhs_scale": struct(128)}, ValueError, ["`rhs_scale`", "(256,)", "(128,)"]),
    (GOOD, FUSED | {"config": overlap.Config(stages=9)}, ValueError, ["shared memory", "`stages`"]),
    (GOOD, FUSED | {"config": overlap.Config(cluster=2)}, ValueError, ["`cluster`", "`stream_k`", "2 and 1"]),
    (GOOD, FUSED | {"config": overlap.Config(stream_k=2)}, ValueError, ["`cluster`", "`stream_k`", "1 and 2"]),
    (GOOD, FUSED | {"config": overlap.Config(split_k=2)}, ValueError, ["`split_k`", "got 2"]),
    ((struct(128, 64), struct(1, 64, 8)), FUSED, NotImplementedError, ["`rhs`", "leading", "(1,)", "xla"]),
    ((struct(128, 64), struct(64, 201)), FUSED, NotImplementedError, ["n=201", "16 bytes", "xla"]),
    ((struct(128, 60), struct(60, 256)), FUSED, NotImplementedError, ["k=60", "16 bytes", "xla"]),
    (
        (struct(128, 64), struct(64, 24)),
        FUSED | COLUMNS,
        NotImplementedError,
        ["device's part of rhs", "n / 2=12", "16 bytes"],
    ),
    (
        (struct(64, 24), struct(64, 8)),
        FUSED | {"transpose_lhs": True},
        NotImplementedError,
        ["part of lhs", "m / 2=12"],
    ),
    ((struct(0, 64), struct(64, 256)), FUSED, NotImplementedError, ["=0", "at least 1", "xla"]),
    ((struct(0, 8, 8), struct(8, 8)), FUSED, NotImplementedError, ["`lhs`", "at least 1", "(0,)"]),
    (OF_8_BITS, FUSED, NotImplementedError, ["8-bit", "transpose_rhs=True", "xla"]),
    ((struct(8, 8, dtype=F32), struct(8, 8, dtype=F32)), FUSED, NotImplementedError, ["float32", "cast", "xla"]),
]


@pytest.mark.parametrize(("args", "keywords", "error", "fragments"), WRONG_CALLS)
def test_wrong_calls(args, keywords, error, fragments):
    with pytest.raises(error) as caught:
        trace(*args, **keywords)
    for fragment in fragments:
        assert fragment in str(caught.value)
    if error is NotImplementedError:
        # Valid calls, which XLA serves.
        rank = max(len(x.shape) for x in args)
        assert trace(*args, **keywords | {"implementation": None}).ndim == rank


SPREAD, ONCE = FUSED | {"config": SMALL}, FUSED | {"config": SMALL.replace(one_shot=True)}
WRONG_SUMS_FOR_ALL = [
    ((struct(128, 64), struct(32, 256)), {}, ValueError, ["`lhs`", "`rhs`", "k=64", "k=32"]),
    ((struct(128, 128), GOOD[1]), {}, ValueError, ["k=128", "k=64", "not sharded", "2 devices", "in_specs"]),
    (
        (GOOD[0], [np.zeros((64, 256))] * 2),
        {},
        ValueError,
        ["`lhs` and `rhs`", "one array", "list of 2", "give each matrix"],
    ),
    (GOOD, {"axis_name": "y"}, ValueError, ["`axis_name`", "'y'", "('x',)"]),
    (GOOD, {"bias": struct(128)}, ValueError, ["`bias`", "(256,)", "(128,)"]),
    (GOOD, {"addend": struct(64, 256)}, ValueError, ["`addend`", "(128, 256)", "(64, 256)"]),
    (GOOD, {"lhs_scale": struct(64, 1)}, ValueError, ["`lhs_scale`", "(128, 1)", "(64, 1)"]),
    (GOOD, {"rhs_scale": struct(128)}, ValueError, ["`rhs_scale`", "(256,)", "(128,)"]),
    (GOOD, FUSED | {"config": overlap.Config(stages=9)}, ValueError, ["shared memory", "`stages`"]),
    (GOOD, FUSED | {"config": overlap.Config(stream_k=2)}, ValueError, ["`cluster`", "`stream_k`", "1 and 2"]),
    (GOOD, ONCE | {"config": overlap.Config(one_shot=True, split_k=2)}, ValueError, ["`split_k`", "got 2"]),
    # Neither rows nor columns can be split equally among the devices.
    (
        (struct(127, 64), struct(64, 200)),
        SPREAD,
        NotImplementedError,
        ["m=127", "n=200", "of 2", "16", "one_shot=True"],
    ),
    ((struct(64, 24), struct(64, 200)), SPREAD | {"transpose_lhs": True}, NotImplementedError, ["m=24", "of 16 or n"]),
    ((struct(128, 64), struct(64, 201)), SPREAD, NotImplementedError, ["n=201", "16 bytes", "xla"]),
    ((struct(128, 64), struct(64, 201)), ONCE, NotImplementedError, ["n=201", "16 bytes", "xla"]),
    ((struct(127, 60), struct(60, 200)), ONCE, NotImplementedError, ["k=60", "16 bytes", "xla"]),
    ((struct(128, 64), struct(1, 64, 8)), FUSED, NotImplementedError, ["`rhs`", "leading", "(1,)", "xla"]),
    ((struct(0, 8, 8), struct(8, 16)), FUSED, NotImplementedError, ["`lhs`", "at least 1", "(0,)"]),
    ((struct(8, 8, dtype=F32), struct(8, 16, dtype=F32)), SPREAD, NotImplementedError, ["float32", "cast", "xla"]),
    (OF_8_BITS, ONCE, NotImplementedError, ["8-bit", "transpose_rhs=True", "xla"]),
]


@pytest.mark.parametrize(("args", "keywords", "error", "fragments"), WRONG_SUMS_FOR_ALL)
def test_wrong_calls_of_sums_for_all(args, keywords, error, fragments):
    with pytest.raises(error) as caught:
        trace_all(*args, **keywords)
    for fragment in fragments:
        assert fragment in str(caught.value)
    if error is NotImplementedError:
        # Valid calls, which XLA serves.
        given = {name: x for name, x in keywords.items() if name != "config"} | {"implementation": None}
        assert trace_all(*args, **given).ndim == max(len(x.shape) for x in args)


def trace_all(*args, **keywords):
    return trace(*args, operation=overlap.matmul_all_reduce, **keywords)


def test_sums_that_cannot_be_cut_in_one_shot():
    args = struct(127, 64), struct(64, 200)
    assert trace_all(*args, **ONCE).shape == (127, 200)
    assert trace_all(struct(128, 64), args[1], **SPREAD).shape == (128, 200)
    assert trace_all(args[0], struct(64, 208), **SPREAD).shape == (127, 208)


def test_outside_shard_map():
    with pytest.raises(ValueError, match=r"`matmul_reduce_scatter` must be called inside `jax.shard_map`"):
        overlap.matmul_reduce_scatter(jnp.zeros((8, 8)), jnp.zeros((8, 8)), "x")
    with pytest.raises(ValueError, match=r"`matmul_all_reduce` must be called inside `jax.shard_map`"):
        overlap.matmul_all_reduce(jnp.zeros((8, 8)), jnp.zeros((8, 8)), "x")
    # The call in the message has all arguments that are needed.
    with pytest.raises(ValueError, match=r"overlap.all_gather_rhs_matmul\(x, w, 'x', dimension=…\), mesh=mesh"):
        overlap.all_gather_rhs_matmul(jnp.zeros((8, 8)), jnp.zeros((8, 8)), "x", dimension=0)


def test_shapes_and_dtypes():
    for implementation in ("fused", "xla"):
        given = {"implementation": implementation}
        assert trace(*GOOD, **given).shape == (64, 256) and trace(*GOOD, **given).dtype == BF16
        assert trace(*GOOD, **given, **COLUMNS).shape == (128, 128)
        assert trace(*GOOD, **given, preferred_element_type=F32).dtype == F32
        assert trace(struct(2, 3, 128, 64), GOOD[1], **given).shape == (2, 3, 64, 256)
        lhs, rhs = struct(128, 64, dtype=E4M3), struct(256, 64, dtype=E5M2)
        assert trace(lhs, rhs, transpose_rhs=True, **given).dtype == BF16


def explain(*args, **keywords):
    return answer(overlap.matmul_reduce_scatter, *args, "x", mesh=make_mesh(x=2), **keywords)


def test_explain(monkeypatch):
    assert explain(*GOOD).implementation == "xla"
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "measurements", lambda: ())
    unknown = explain(*GOOD)
    assert unknown.implementation == "xla" and "not measured" in str(unknown)
    rows = Problem("matmul_reduce_scatter", 128, 256, 64, "bfloat16", "bfloat16", devices=2)
    monkeypatch.setattr(crossover, "measurements", lambda: (crossover.Measured(rows, 90.0, 100.0),))
    assert explain(*GOOD).implementation == "fused"
    # Measurements of blocks of rows do not apply to blocks of columns.
    assert explain(*GOOD, **COLUMNS).implementation == "xla"
    for keywords in ({}, COLUMNS, {"preferred_element_type": F32}, {"transpose_lhs": True}):
        chosen = explain(struct(8192, 8192), struct(8192, 8192), **keywords, **FUSED)
        assert chosen.implementation == "fused" and chosen.source == "heuristic"
        assert (chosen.config.cluster, chosen.config.stream_k, chosen.config.split_k) == (1, 1, 1)
        # In the result's dtype: the half of this device's product that is sent, and the half that arrives, in tiles.
        half = (8192, 4096) if keywords is COLUMNS else (4096, 8192)
        tile = chosen.config.tile_m, chosen.config.tile_n
        rows, columns = (-(-size // of_tile) * of_tile for size, of_tile in zip(half, tile, strict=True))
        assert chosen.scratch_bytes == 2 * rows * columns * (4 if "preferred_element_type" in keywords else 2)
        assert f"scratch: {chosen.scratch_bytes:,} bytes" in str(chosen)
    assert explain(*GOOD, config=SMALL).config == SMALL
    refused = explain(GOOD[0], struct(64, 201))
    assert refused.implementation == "xla" and "n=201" in refused.reason
    with pytest.raises(ValueError, match="`dimension`"):
        explain(*GOOD, dimension=3)
    with pytest.raises(ValueError, match="m=127"):
        explain(struct(127, 64), GOOD[1])


def test_explain_of_sums_for_all(monkeypatch):
    def explain(*args, **keywords):
        return answer(overlap.matmul_all_reduce, *args, "x", mesh=make_mesh(x=4), **keywords)

    assert explain(*GOOD).implementation == "xla"
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "measurements", lambda: ())
    unknown = explain(*GOOD)
    assert unknown.implementation == "xla" and "not measured" in str(unknown)
    measured = Problem("matmul_all_reduce", 128, 256, 64, "bfloat16", "bfloat16", devices=4)
    monkeypatch.setattr(crossover, "measurements", lambda: (crossover.Measured(measured, 90.0, 100.0),))
    assert explain(*GOOD).implementation == "fused"
    # Few rows in one shot, many in blocks. Scratch in one shot: the own part, and a part from each device. In blocks:
    # the parts that are sent, and the parts that arrive.
    for m, one_shot, parts in ((16, True, 5), (8192, False, 2 * 3 / 4)):
        for dtype in (BF16, F32):
            chosen = explain(struct(m, 8192), struct(8192, 8192), preferred_element_type=dtype, **FUSED)
            assert chosen.implementation == "fused" and chosen.config.one_shot == one_shot
            columns = -(-8192 // chosen.config.tile_n) * chosen.config.tile_n  # Counted in whole tiles.
            assert chosen.scratch_bytes == m * columns * jnp.dtype(dtype).itemsize * parts
            assert f"scratch: {chosen.scratch_bytes:,} bytes" in str(chosen)
    assert explain(*GOOD, config=SMALL).config == SMALL
    for config in (SMALL, SMALL.replace(one_shot=True)):
        refused = explain(struct(127, 64), struct(64, 200), config=config)
        assert refused.implementation == ("fused" if config.one_shot else "xla"), str(refused)
    assert "m=127" in explain(struct(127, 64), struct(64, 200), config=SMALL).reason
    # Without `config=`, the library chooses one.
    assert explain(struct(127, 64), struct(64, 200), **FUSED).config.one_shot


@pytest.mark.parametrize(
    ("axes", "along"), [({"x": 3}, "n"), ({"data": 2, "x": 2}, "m"), ({"x": 4}, EVERYWHERE)], ids=str
)
def test_lowers_for_cuda(axes, along, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    mesh, size, layer = make_mesh(**axes), axes["x"], Layer(along, dtype=BF16)
    arrays = {"lhs": struct(size * 256, size * 512), "rhs": struct(size * 512, size * 512)}
    lowered = layer.mapped(mesh, arrays, lambda arrays: layer(arrays, config=None)).trace(arrays)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    peers = ",".join(str(device) for device in range(mesh.size))
    assert "mosaic_gpu" in text and f'xla_replica_ids = "{peers}"' in text
