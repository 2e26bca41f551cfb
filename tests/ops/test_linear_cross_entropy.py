"""The loss without logits: results and gradients against formulas in float64, its options, and its refusals."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap import Config
from overlap.collectives.loss import linear_cross_entropy as implementation
from overlap.collectives.loss import statistics
from overlap.emulation import emulate
from overlap.kernels.target import emulating
from overlap.single_gpu import logits_product
from tests.ops.loss_cases import EVERYTHING, UNCAPPED, Case, distances, drawn, formulas, plain, program
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax


CASES = [
    Case(),
    Case(transpose_w=True, vocabulary=327, gpu="blackwell", **EVERYTHING),
    Case(devices=2, columns=336, vocabulary=321, **EVERYTHING),
    Case(devices=2, gather=False, transpose_w=True, dtype=jnp.float16, columns=336),
    Case(chunk=None, gpu="blackwell"), Case(devices=2, columns=336, vocabulary=321, chunk=None, **UNCAPPED),
    Case(tokens=71, columns=301, transpose_w=True, chunk=None, size=1.0, ignores=True, with_bias=True),
]  # fmt: skip
MORE = [
    Case(devices=2, gather=False, transpose_w=True, dtype=jnp.float16, columns=336, chunk=None),
    Case(devices=4, columns=352, vocabulary=250, chunk=None, check_vma=False, **UNCAPPED),
    Case(tokens=300, columns=712, chunk=None, gpu="blackwell", **UNCAPPED),
    Case(devices=4, columns=352, vocabulary=250, chunk=64, check_vma=False, **EVERYTHING),  # One has no column.
    Case(devices=2, columns=336, check_vma=False, weighted=True),
    Case(tokens=1, features=8, columns=8, chunk=None), Case(tokens=300, columns=712, chunk=256),
    Case(transpose_w=True, columns=301, **EVERYTHING), Case(gpu="blackwell", tokens=130),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_results_and_gradients(case: Case) -> None:
    """By kernels and by chunks of XLA: at most twice as far from the formulas as unfused. Two launches: same bits."""
    given = drawn(case)
    expected = formulas(case, given)
    with emulating(case.gpu), emulate(cores=3):
        run = program(case, "fused")
        found, again = run(given), run(given)
    for name, x in found.items():
        assert (np.asarray(x) == np.asarray(again[name])).all(), name
    unfused = distances(jax.jit(functools.partial(plain, case))(given), expected)
    for results in (found, program(case, "xla")(given), program(dataclasses.replace(case, chunk=None), "xla")(given)):
        for name, distance in distances(results, expected).items():
            assert distance <= 2 * unfused[name], (name, distance, unfused[name])


@pytest.mark.parametrize("config", [
    pytest.param(Config(tile_m=64, tile_n=256, stages=3, schedule="pingpong"), marks=pytest.mark.slow),
    pytest.param(Config(tile_m=128, tile_n=64, stages=2, schedule="pingpong"), marks=pytest.mark.slow),
    pytest.param(Config(tile_m=64, tile_n=128, stages=2), marks=pytest.mark.slow),
    pytest.param(Config(tile_m=256, tile_n=128, stages=3, order_minor="n"), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_configurations(config: Config) -> None:
    case = Case(tokens=300, columns=712, chunk=256, **EVERYTHING)
    given = drawn(case)
    expected = formulas(case, given)
    with emulate(cores=3):
        found = distances(program(case, "fused", config=config)(given), expected)
    unfused = distances(plain(case, given), expected)
    assert all(found[name] <= 2 * unfused[name] for name in found), (found, unfused)


def loss(*given: Any, implementation: Any = "fused", **words: Any) -> Any:
    return overlap.linear_cross_entropy(*given, implementation=implementation, **{"chunk": 128, **words})


def operands(**words: Any) -> tuple[Any, Any, Any]:
    given = drawn(Case(**words))
    return given["x"], given["w"], given["labels"]


@pytest.mark.parametrize("words", [
    {}, {"chunk": None}, {"implementation": "xla"}, {"implementation": "xla", "chunk": None},
], ids=str)  # fmt: skip
def test_labels_of_no_column(words: dict[str, Any]) -> None:
    """Known ones are refused; others make the loss of their token NaN, its gradient, and that of all of w."""
    x, w, labels = operands()
    wrong = labels.at[5].set(328)
    with pytest.raises(ValueError, match=r"`labels` must be from 0 to 327, got 328: .*ignored_label=328"):
        loss(x, w, wrong, **words)

    def total(x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = loss(x, w, labels, **words)
        return found.sum(), found

    with emulate(cores=2):
        (dx, dw), found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, w, wrong)
    assert np.isnan(found[5]) and np.isfinite(np.delete(found, 5)).all()
    bad = np.isnan(np.asarray(dx, np.float32)).all(axis=1)
    assert bad[5] and bad.sum() == 1 and np.isnan(np.asarray(dw, np.float32)).all()


def test_all_tokens_ignored_and_labels_of_every_type() -> None:
    x, w, labels = operands()
    grad = jax.jit(jax.value_and_grad(lambda x, w, y: loss(x, w, y, ignored_label=7).sum(), (0, 1)))
    with emulate(cores=2):
        value, cotangents = grad(x, w, jnp.full(72, 7))
        assert value == 0 and not any(np.asarray(d, np.float32).any() for d in cotangents)
        expected = np.asarray(loss(x, w, labels % 100))
        for dtype in (np.int8, np.uint32):
            np.testing.assert_array_equal(loss(x, w, np.asarray(labels % 100).astype(dtype)), expected)
        with jax.enable_x64(True):
            far = np.asarray(labels % 100, np.int64)
            np.testing.assert_array_equal(loss(x, w, far), expected)
            far[3] += 2**32  # Not the label that its last 32 bits are.
            assert np.isnan(jax.jit(loss)(x, w, far)[3])


@pytest.mark.parametrize("chunk", [128, None])
def test_lse_and_biases_of_minus_infinity(chunk: int | None) -> None:
    x, w, labels = operands()
    bias = jnp.zeros(328).at[64:200].set(-jnp.inf)  # Whole blocks of columns.
    labels = labels % 64

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        how: Any = {"bias": bias, "return_lse": True, "chunk": chunk, "implementation": "fused"}
        return overlap.linear_cross_entropy(x, w, labels, **how)

    with emulate(cores=2):
        found, lse = jax.jit(both)(x)
        dx = jax.jit(jax.grad(lambda x: both(x)[1].sum()))(x)
    wide = np.asarray(w, np.float64)[:, np.r_[:64, 200:328]]
    z = np.asarray(x, np.float64) @ wide
    expected = np.log(np.exp(z).sum(axis=1))
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
    np.testing.assert_allclose(found, expected - z[np.arange(72), labels], rtol=1e-4, atol=1e-4)
    p = np.exp(z - expected[:, None])
    assert np.linalg.norm(np.asarray(dx, np.float64) - p @ wide.T) <= 1e-2 * np.linalg.norm(p @ wide.T)


@pytest.mark.parametrize(("implementation", "chunk"), [
    ("fused", None), ("fused", 64), ("xla", None), pytest.param("xla", 64, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_device_whose_columns_do_not_count(implementation: Any, chunk: int | None) -> None:
    """By biases of −∞, which a mask may be. Its gradients are zero, and those of the other device are right."""
    case = Case(devices=2, columns=256, with_bias=True, chunk=chunk)
    given = drawn(case)
    given["labels"] %= 128
    narrow = Case(columns=128, with_bias=True)
    of_narrow = {**given, "w": given["w"][:, :128], "bias": given["bias"][:128]}
    expected = formulas(narrow, of_narrow)
    for name in ("w", "bias"):
        expected[name] = np.concatenate([expected[name], np.zeros_like(expected[name])], axis=-1)
    given["bias"] = given["bias"].at[128:].set(-jnp.inf)
    with emulate(cores=2):
        found = distances(program(case, implementation)(given), expected)
    assert max(found.values()) < 0.01, found


BY_CHUNKS = pytest.param(128, marks=pytest.mark.slow)


@pytest.mark.parametrize("chunk", [None, BY_CHUNKS])
def test_transforms(chunk: int | None) -> None:
    """Under `checkpoint` and a `scan` over microbatches, `vmap`, forward mode; and derivatives of the gradient."""
    x, w, labels = operands(columns=136)
    of_tokens = functools.partial(loss, chunk=chunk)

    def step(f: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        batches = x.reshape(2, 36, -1), labels.reshape(2, 36)
        return jax.lax.scan(lambda total, batch: (total + f(batch[0], w, batch[1]).sum(), None), 0.0, batches)[0]

    with emulate(cores=2, detect_races=False):
        for name in ("fused", "xla"):
            one = functools.partial(of_tokens, implementation=name)
            (dx, dw) = jax.jit(jax.grad(lambda x, w, one=one: one(x, w, labels).sum(), (0, 1)))(x, w)
            kept = jax.checkpoint(one)
            again = jax.jit(jax.grad(functools.partial(step, kept), (0, 1)))(x, w)
            for a, b in zip((dx, dw), again, strict=True):
                a, b = (np.asarray(value, np.float64) for value in (a, b))
                assert np.isfinite(b).all() and np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(a)
        mapped = jax.jit(jax.vmap(lambda x, y: of_tokens(x, w, y)))(x.reshape(2, 36, -1), labels.reshape(2, 36))
        np.testing.assert_allclose(mapped.reshape(-1), of_tokens(x, w, labels), rtol=1e-5)
        of_all = jax.vmap(jax.grad(lambda x, y: of_tokens(x, w, y).sum()))
        found = jax.jit(of_all)(x.reshape(2, 36, -1), labels.reshape(2, 36))
        np.testing.assert_array_equal(
            found.reshape(x.shape), jax.jit(jax.grad(lambda x: of_tokens(x, w, labels).sum()))(x)
        )
        of = lambda x, **words: of_tokens(x, w, labels, **words).sum()  # noqa: E731
        direction = jnp.ones_like(x)
        _, along = jax.jit(lambda x: jax.jvp(of, (x,), (direction,)))(x)
        np.testing.assert_allclose(along, np.asarray(dx, np.float64).sum(), rtol=0.05, atol=1.0)
        second = [
            jax.jit(lambda x, of=of: jax.grad(lambda x: (jax.grad(of)(x).astype(jnp.float32) ** 2).sum())(x))(x)
            for of in (of, functools.partial(of, implementation="xla"))
        ]
    a, b = (np.asarray(value, np.float64) for value in second)
    assert np.isfinite(a).all() and np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b) and b.any()


@pytest.mark.parametrize("chunk", [None, BY_CHUNKS])
def test_where_the_partitioner_would_have_to_split_the_kernels(monkeypatch: Any, chunk: int | None) -> None:
    """XLA runs in their place, with the same results; if the caller asked for the kernels, the call is refused."""
    x, w, labels = operands(columns=136)
    placed = jax.device_put(x, jax.NamedSharding(make_mesh(x=2), P("x")))
    of = lambda x, **words: loss(x, w, labels, chunk=chunk, **words).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"in a program for 2 devices, .* call it inside jax\.shard_map"):
        jax.jit(jax.grad(of))(placed)
    chosen = implementation._chosen
    monkeypatch.setattr(implementation, "_chosen", lambda *given: dataclasses.replace(chosen(*given), must_fuse=False))
    expected = jax.grad(functools.partial(of, implementation="xla"))(x)
    found, expected = (np.asarray(value, np.float64) for value in (jax.jit(jax.grad(of))(placed), expected))
    assert np.linalg.norm(found - expected) <= (0.01 if chunk is None else 0) * np.linalg.norm(expected)


OK = (jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16), jnp.zeros(16, jnp.int32))
F8 = jnp.float8_e4m3fn
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((OK[0][None], *OK[1:]), {}, ValueError, r"`x` must have 2 dimensions, got shape \(1, 16, 64\): reshape it"),
    ((OK[0], OK[1].astype(jnp.float32), OK[2]), {}, ValueError, "got bfloat16 and float32: cast one"),
    ((OK[0].astype(F8), OK[1].astype(F8), OK[2]), {}, ValueError, "of at least 16 bits, got float8_e4m3fn"),
    ((OK[0], OK[1].T, OK[2]), {}, ValueError, r"got 128 of shape \(128, 64\) and 64 .*transpose_w=True"),
    ((*OK[:2], OK[2].astype(jnp.float32)), {}, ValueError, "`labels` must be an array of integers"),
    ((*OK[:2], OK[2][:8]), {}, ValueError, r"`labels` must have an entry for each row of `x`, \(16,\), got .*\(8,\)"),
    (OK, {"bias": jnp.ones(64)}, ValueError, r"`bias` must have an entry for each column of `w`, \(128,\)"),
    (OK, {"soft_cap": 0}, ValueError, "`soft_cap` must be None or a positive number, got 0"),
    (OK, {"z_loss": -1.0}, ValueError, "`z_loss` must be a number of at least 0, got -1.0"),
    (OK, {"ignored_label": 0.5}, ValueError, "`ignored_label` must be None or an integer of 32 bits, got 0.5"),
    (OK, {"vocabulary_size": 200}, ValueError, "at most the 128 columns of `w` on all devices, got 200: pad w"),
    (OK, {"chunk": 100}, ValueError, "`chunk` must be a multiple of 64, got 100: round it"),
    (OK, {"axis_name": "x"}, ValueError, "must be called inside `jax.shard_map`"),
    (OK, {"implementation": "cuda"}, ValueError, "`implementation` must be None or one of"),
    (OK, {"implementation": "fused", "config": Config(stream_k=2)}, ValueError, "`stream_k`, `split_k` and `cluster`"),
    (tuple(x.astype(jnp.float32) for x in OK[:2]) + OK[2:], {"implementation": "fused"}, NotImplementedError,
     'multiplies float16, bfloat16.*, got float32 operands: cast them, or use implementation="xla"'),
    ((OK[0], OK[1][:, :127], OK[2]), {"implementation": "fused"}, NotImplementedError, "multiples of 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refusals(given: Any, words: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        overlap.linear_cross_entropy(*given, **words)


@pytest.mark.parametrize(("spec", "axis", "message"), [
    (P(), "x", "`w` must be each device's own part of the vocabulary, got one .* on all 2 devices along 'x': shard it"),
    (P(None, "x"), ("x", "y"), "on all 2 devices along 'y'"),
    (P(), ("x", "y"), r"on all 4 devices along 'x', 'y': .*pcast\(w, \('x', 'y',\), to=\"varying\"\)"),
])  # fmt: skip
def test_a_whole_vocabulary_in_place_of_a_part(spec: P, axis: Any, message: str) -> None:
    """It would be counted once for each device. Its type says so, and a part that is meant can say so, too."""
    x, w, labels = (jnp.asarray(value) for value in OK)
    mesh = make_mesh(x=2, y=2)

    def run(as_part: Any, **given: Any) -> Any:
        call = lambda x, w, labels: overlap.linear_cross_entropy(x, as_part(w), labels, axis, gather=False)  # noqa: E731
        mapped = jax.shard_map(call, mesh=mesh, in_specs=(P(), spec, P()), out_specs=P(), **given)
        return jax.eval_shape(mapped, x, w, labels)

    with pytest.raises(ValueError, match=message):
        run(lambda w: w)
    run(lambda w: w, check_vma=False)  # Types say nothing.
    sharded = [name for name in spec if name is not None]
    same = tuple(name for name in ("x", "y") if name in axis and name not in sharded)
    run(lambda w: jax.lax.pcast(w, same, to="varying"))


def test_explain_and_the_choice() -> None:
    """XLA while its logits take little memory; kernels where they would take more than a GiB, and for a `chunk`."""
    kind = "NVIDIA H100 80GB HBM3"
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), abstract_device=device)

    def chosen(tokens: int, columns: int, dtype: Any = jnp.bfloat16, **words: Any) -> Any:
        of = jax.ShapeDtypeStruct
        x, w, labels = of((tokens, 512), dtype), of((512, columns), dtype), of((tokens,), jnp.int32)
        grad = jax.grad(lambda x, w, y: overlap.linear_cross_entropy(x, w, y, "x", **words).sum())
        (choice,) = overlap.explain(grad, x, w, labels, mesh=mesh)
        return choice

    large = chosen(4096, 65536)
    assert (large.op, large.implementation) == ("linear_cross_entropy", "fused")
    assert large.shapes == "8192x65536x512 bfloat16" and "2,147,483,648 bytes" in large.reason
    assert large.config == logits_product.OF_STATISTICS[0]
    # On each of 2 devices, in 16 bits.
    assert large.plan == "keeps 1,073,741,824 bytes for the backward pass"
    again = "the backward pass computes logits again"
    assert chosen(4096, 65536, chunk=4096).plan == chosen(32768, 65536).plan == again
    assert chosen(4096, 65536, jnp.float32).implementation == "xla"
    assert chosen(512, 4096).implementation == "xla" and chosen(512, 4096, chunk=512).implementation == "fused"
    assert chosen(512, 4096, implementation="xla").reason == "asked for"


def as_numbered_from_zero(body: Any, values: Any, columns: Any, of: Any = logits_product._Body._logits) -> Any:
    z, numbers, slope = of(body, values, columns)
    return z, numbers - body._first, slope


def with_another_z(given: Any, *more: Any, of: Any = statistics._dz_of_shares) -> Any:
    return of({**given, "at_label": given["at_label"] - 0.05}, *more)


@pytest.mark.parametrize(("defect", "chunk"), [
    ("base", 128), ("padding", 128), ("first", 128), ("labels", 128), ("z", None),
    *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("base", "padding")),
])  # fmt: skip
def test_a_defect_is_seen(monkeypatch: Any, defect: str, chunk: int | None) -> None:
    """A negative control: with a defect in the kernels, the comparison of `test_results_and_gradients` fails."""
    kernels, backward = "overlap.single_gpu.logits_product", "overlap.collectives.loss.statistics"
    name, wrong = {
        "base": (f"{kernels}._LOG2_E", 1.3), "padding": (f"{kernels}.FAR", 10.0),
        "first": (f"{kernels}._Body._first", 0), "labels": (f"{kernels}._Body._logits", as_numbered_from_zero),
        "z": (f"{backward}._dz_of_shares", with_another_z),
    }[defect]  # fmt: skip
    monkeypatch.setattr(name, wrong)
    case = Case(vocabulary=300, chunk=chunk, size=0.6 if defect == "z" else 0.3)
    given = drawn(case)
    if defect == "z":  # It matters where a label is almost certain.
        given["labels"] = (given["x"] @ given["w"])[:, :300].argmax(axis=1).astype(jnp.int32)
    expected = formulas(case, given)
    jax.clear_caches()  # Neither is a trace of another test taken for this one, nor this one for others.
    with emulate(cores=2):
        found = program(case, "fused")(given)
    jax.clear_caches()
    unfused = distances(plain(case, given), expected)
    parts = {name: np.asarray(x, np.float64) for name, x in found.items()}
    off = {name: np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name]) for name, x in parts.items()}
    assert not all(off[name] <= 2 * unfused[name] for name in off)


def test_unsigned_labels_of_64_bits() -> None:
    """Under x64 they stay what they are: right labels are right, and those beyond 32 bits are wrong."""
    given = drawn(Case())
    wanted = overlap.linear_cross_entropy(given["x"], given["w"], np.asarray(given["labels"]) % 8)
    with jax.enable_x64(True):
        labels = jnp.asarray(np.asarray(given["labels"]) % 8, jnp.uint64)
        found = jax.jit(overlap.linear_cross_entropy)(given["x"], given["w"], labels)
        beyond = jax.jit(overlap.linear_cross_entropy)(given["x"], given["w"], labels + 2**40)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert np.isnan(np.asarray(beyond)).all()


def test_no_tokens() -> None:
    """Also with an axis, where XLA would refuse to gather them."""

    def loss(x: Any, w: Any, labels: Any) -> Any:
        return overlap.linear_cross_entropy(x, w, labels, "x", return_lse=True)

    mesh = make_mesh(x=2)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P(None, "x"), P("x")), out_specs=P("x"))
    x, w, labels = jnp.zeros((0, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16), jnp.zeros(0, jnp.int32)
    for run in (mapped, jax.jit(mapped)):
        assert [(out.shape, out.dtype) for out in run(x, w, labels)] == [((0,), jnp.float32)] * 2
    assert not jax.jit(jax.grad(lambda w: mapped(x, w, labels)[0].sum()))(w).any()


def test_a_symbolic_number_of_tokens() -> None:
    (tokens,) = jax.export.symbolic_shape("t")
    of = jax.ShapeDtypeStruct
    types = of((tokens, 64), jnp.bfloat16), of((64, 128), jnp.bfloat16), of((tokens,), jnp.int32)
    chance = np.random.default_rng()
    given = tuple(jnp.asarray(chance.standard_normal(shape), jnp.bfloat16) for shape in ((5, 64), (64, 128)))
    labels = jnp.arange(5)
    for options in ({}, {"chunk": 64}):
        loss = functools.partial(overlap.linear_cross_entropy, **options)
        exported = jax.export.export(jax.jit(lambda *x, loss=loss: loss(*x)))(*types)
        np.testing.assert_allclose(exported.call(*given, labels), loss(*given, labels), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="built for sizes that are numbers"):
        jax.export.export(jax.jit(functools.partial(overlap.linear_cross_entropy, implementation="fused")))(*types)
