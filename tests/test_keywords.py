"""Tests the same keywords on all operations: right with XLA; fused kernels without support refuse in the same words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests import oracle

M, K, N, D = 48, 32, 16, 2
OPERATIONS = (
    "matmul",
    "all_gather_lhs_matmul",
    "all_gather_rhs_matmul n",
    "all_gather_rhs_matmul k",
    "matmul_reduce_scatter sum",
    "matmul_all_reduce whole sum",
)
CONFIG = overlap.Config(tile_m=64, tile_n=128, stages=2)


def draw(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32) / 4


@functools.cache
def mesh():
    return oracle.make_mesh(x=D)


class Case:
    """A call with global operands. Each dimension is a letter; "b" and "c" are leading dimensions."""

    def __init__(self, op, lhs="mk", rhs="kn", **extras):
        self.op, _, along = op.partition(" ")
        self.sharded = {"matmul": None, "all_gather_lhs_matmul": "m"}.get(self.op, along)
        self.letters = {
            "lhs": lhs,
            "rhs": rhs,
            **{name: given for name, given in extras.items() if isinstance(given, str)},
        }
        self.rest = {name: given for name, given in extras.items() if not isinstance(given, str)}
        sizes = {"b": 2, "c": 3, "m": M, "k": K, "n": N, "1": 1}
        self.arrays = {
            name: draw(seed, *(sizes[letter] for letter in letters))
            for seed, (name, letters) in enumerate(self.letters.items())
        }

    def keywords(self):
        swapped = {name: self.letters[name][-2:] in ("km", "nk") for name in ("lhs", "rhs")}
        along = {
            "m": {},
            None: {},
            "n": {"dimension": 1 - swapped["rhs"]},
            "k": {"dimension": int(swapped["rhs"])},
            "sum": {},
            "whole sum": {},
        }
        transposed = {f"transpose_{name}": True for name, is_swapped in swapped.items() if is_swapped}
        return along[self.sharded] | transposed | self.rest

    def specs(self):
        """Returns the partition spec of each array. The operand that is not gathered is sharded in its other dimension.

        For a sum over the devices, both operands are sharded along k. The addend is sharded as the result is.
        """
        cut = {None: {}, "m": {"lhs": "m", "lhs_scale": "m"}, "n": {"rhs": "n", "rhs_scale": "n"}, "k": {"rhs": "k"},
               "sum": {"lhs": "k", "rhs": "k", "addend": "m"}, "whole sum": {"lhs": "k", "rhs": "k"}}  # fmt: skip
        of = cut[self.sharded]
        return {
            name: P(*("x" if x == of.get(name) else None for x in letters)) for name, letters in self.letters.items()
        }

    def __call__(self, implementation=None, **more):
        operation = getattr(overlap, self.op)

        def call(arrays):
            arrays = {
                name: x.astype(jnp.bfloat16) if name in ("lhs", "rhs", "addend") else x for name, x in arrays.items()
            }
            axis = () if self.sharded is None else ("x",)
            lhs, rhs = arrays.pop("lhs"), arrays.pop("rhs")
            return operation(lhs, rhs, *axis, **arrays, **self.keywords(), implementation=implementation, **more)

        batch = max((self.letters["lhs"][:-2], self.letters["rhs"][:-2]), key=len)
        scattered = P(*(None for _ in batch), "x") if self.sharded == "sum" else P()
        mapped = jax.shard_map(call, mesh=mesh(), in_specs=(self.specs(),), out_specs=scattered, check_vma=False)
        return np.asarray(jax.jit(mapped)(self.arrays), np.float32)

    def expected(self):
        a = self.arrays
        batch = max((self.letters["lhs"][:-2], self.letters["rhs"][:-2]), key=len)
        out = np.einsum(f"{self.letters['lhs']},{self.letters['rhs']}->{batch}mn", a["lhs"], a["rhs"])
        out = out * a.get("lhs_scale", 1) * a.get("rhs_scale", 1) + a.get("bias", 0) + a.get("addend", 0)
        activation = self.rest.get("activation")
        return out if activation is None else np.asarray(activation(out))


EXTRAS = [
    {"bias": "n"},
    {"addend": "mn"},
    {"activation": jax.nn.relu},
    {"lhs_scale": "m1"},
    {"rhs_scale": "n"},
    {"bias": "n", "addend": "mn", "lhs_scale": "m1", "rhs_scale": "n", "activation": jnp.tanh},
    {"lhs": "km"},
    {"rhs": "nk"},
    {"lhs": "km", "rhs": "nk", "bias": "n"},
    {"lhs": "bmk", "lhs_scale": "bm1", "addend": "bmn"},
    {"lhs": "bcmk", "lhs_scale": "m1", "addend": "mn", "bias": "n"},
    {"rhs": "bkn"},
    {"lhs": "bcmk", "rhs": "bcnk", "rhs_scale": "n", "lhs_scale": "bcm1"},
]
# The keywords and layouts that each fused kernel supports; it names the others in its refusal.
TAKES = {
    "matmul": {"bias", "addend", "activation", "lhs_scale", "rhs_scale", "lhs km", "rhs nk", "rhs batch"},
    "all_gather_lhs_matmul": {"bias", "activation", "lhs_scale", "rhs_scale", "rhs nk"},
    "all_gather_rhs_matmul": {"lhs km"},
    "matmul_reduce_scatter": {"bias", "addend", "activation", "lhs_scale", "rhs_scale", "lhs km", "rhs nk"},
    "matmul_all_reduce": {"bias", "addend", "activation", "lhs_scale", "rhs_scale", "lhs km", "rhs nk"},
}


def needs(extras):
    """Returns the keywords and layouts that a case needs beyond a plain product. A batch of `lhs` counts as plain."""
    found = {name for name in extras if name not in ("lhs", "rhs")}
    found |= {
        f"{name} {extras[name][-2:]}"
        for name, plain in (("lhs", "mk"), ("rhs", "kn"))
        if extras.get(name, plain)[-2:] != plain
    }
    return found | ({"rhs batch"} if len(extras.get("rhs", "")) > 2 else set())


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: " ".join(map(str, extras)))
@pytest.mark.parametrize("op", OPERATIONS)
def test_by_default_every_operation_takes_every_keyword(op, extras):
    case = Case(op, **extras)
    np.testing.assert_allclose(case(preferred_element_type=jnp.float32), case.expected(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: " ".join(map(str, extras)))
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_fused_kernel_takes_a_keyword_or_names_it(op, extras):
    case = Case(op, **extras)
    missing = needs(extras) - TAKES[case.op]
    if not missing:
        with emulate(cores=2):
            np.testing.assert_allclose(case("fused", config=CONFIG), case.expected(), rtol=2e-2, atol=2e-2)
        return
    with pytest.raises(NotImplementedError) as caught:
        case("fused", config=CONFIG)
    names = {"lhs km": "transpose_lhs", "rhs nk": "transpose_rhs", "rhs batch": "rhs"}
    assert any(f"`{names.get(name, name)}`" in str(caught.value) for name in missing), caught.value
    assert 'implementation="xla"' in str(caught.value)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(("name", "shape"), [("bias", (N + 1,)), ("addend", (M, N + 1)), ("lhs_scale", (M + 1, 1))])
def test_a_wrong_shape_is_the_same_error_everywhere(op, name, shape):
    case = Case(op)
    case.letters[name], case.arrays[name] = "n" * len(shape), np.ones(shape, np.float32)
    for implementation in (None, "fused", "xla"):
        with pytest.raises(ValueError, match=f"`{name}` must"):
            case(implementation)


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_rows(op):
    case = Case(op)
    case.arrays["lhs"] = case.arrays["lhs"][:0]
    assert case().shape == (0, N)
    with pytest.raises(NotImplementedError, match="at least 1"):
        case("fused", config=CONFIG)


def test_several_right_operands_have_a_bias_and_an_addend_each():
    lhs, sides = draw(0, M, K), [draw(1 + i, K, n) for i, n in enumerate((16, 24))]
    biases, addends = (
        [draw(3 + i, n) for i, n in enumerate((16, 24))],
        [draw(5 + i, M, n) for i, n in enumerate((16, 24))],
    )

    def call(lhs, sides, biases, addends):
        lhs, sides = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in (lhs, sides))
        return overlap.all_gather_lhs_matmul(
            lhs, sides, "x", bias=biases, addend=addends, activation=jax.nn.relu, preferred_element_type=jnp.float32
        )

    outs = jax.shard_map(call, mesh=mesh(), in_specs=(P("x"), P(), P(), P()), out_specs=P(), check_vma=False)(
        lhs, sides, biases, addends
    )
    for out, rhs, bias, addend in zip(outs, sides, biases, addends, strict=True):
        np.testing.assert_allclose(np.asarray(out), np.maximum(lhs @ rhs + bias + addend, 0), rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="`bias` must be a list with one entry per matrix"):
        jax.shard_map(
            lambda lhs, sides: overlap.all_gather_lhs_matmul(lhs, sides, "x", bias=biases[0]), mesh=mesh(),
            in_specs=(P("x"), P()), out_specs=P(), check_vma=False,
        )(lhs, sides)  # fmt: skip


@pytest.mark.parametrize("shared", ["lhs", "rhs"])
def test_scales_of_rows_with_a_batch_in_the_kernel_under_vmap_and_grad(shared):
    """Each leading index has its own scales, whether `lhs`, `rhs` or both have a leading dimension."""
    lhs = draw(0, *(() if shared == "lhs" else (3,)), M, K)
    rhs, scale = draw(1, 3, K, N), draw(2, 3, M, 1)
    exact = lambda lhs, rhs, scale: ((lhs @ rhs) * scale).sum()  # noqa: E731

    def fused(lhs, rhs, scale):
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return overlap.matmul(
            lhs, rhs, lhs_scale=scale, config=CONFIG, implementation="fused", preferred_element_type=jnp.float32
        ).sum()

    with emulate(cores=2):
        mapped = jax.vmap(lambda rhs, scale: fused(lhs, rhs, scale))(rhs[None], scale[None])
        np.testing.assert_allclose(mapped[0], exact(lhs, rhs, scale), rtol=1e-3)
        found = jax.grad(fused, (0, 1, 2))(lhs, rhs, scale)
    wanted = jax.grad(exact, (0, 1, 2))(lhs, rhs, scale)
    for d, e in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(d), np.asarray(e), rtol=2e-2, atol=5e-2)


def test_right_operands_with_and_without_leading_dimensions():
    lhs, sides = draw(0, M, K), [draw(1, K, N), draw(2, 2, 3, K, N)]
    gathers = lambda lhs, sides: overlap.all_gather_lhs_matmul(lhs, sides, "x", return_gathered=True)  # noqa: E731
    outs, gathered = jax.shard_map(gathers, mesh=mesh(), in_specs=(P("x"), P()), out_specs=P(), check_vma=False)(
        lhs, sides
    )
    np.testing.assert_array_equal(gathered, lhs)
    for out, rhs in zip(outs, sides, strict=True):
        np.testing.assert_allclose(out, lhs @ rhs, rtol=1e-5, atol=1e-5)


def test_right_operands_of_which_some_have_a_bias():
    lhs, rhs, bias = draw(0, M, K), draw(1, K, N), draw(2, N)
    gathers = lambda lhs, rhs, bias: overlap.all_gather_lhs_matmul(lhs, [rhs, rhs], "x", bias=[bias, None])  # noqa: E731
    outs = jax.shard_map(gathers, mesh=mesh(), in_specs=(P("x"), P(), P()), out_specs=P(), check_vma=False)(
        lhs, rhs, bias
    )
    np.testing.assert_allclose(outs[0] - outs[1], np.broadcast_to(bias, (M, N)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPERATIONS)
def test_settings_of_jax(op):
    """Neither strict rank promotion nor running without `jax.jit` changes the result."""
    extras = {"bias": "n", "addend": "mn", "lhs_scale": "m1", "rhs_scale": "n", "activation": jnp.tanh}
    case = Case(op, lhs="bmk", **extras)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_allclose(case(), case.expected(), rtol=3e-2, atol=3e-2)
    if op == "matmul":
        lhs, rhs = (case.arrays[name].astype(jnp.bfloat16) for name in ("lhs", "rhs"))
        with emulate(cores=2), jax.disable_jit():
            out = overlap.matmul(lhs, rhs, config=CONFIG, implementation="fused")
        np.testing.assert_allclose(
            np.asarray(out, np.float32), case.arrays["lhs"] @ case.arrays["rhs"], rtol=2e-2, atol=2e-2
        )


def test_loops_of_a_kernel_stay_loops_without_jit():
    """Rows of weights gathered along k are found by the k step, which would be a plain number in an unrolled loop."""
    lhs, rhs = draw(0, 16, 256).astype(jnp.bfloat16), draw(1, 256, 128).astype(jnp.bfloat16)
    gathers = lambda lhs, rhs: overlap.all_gather_rhs_matmul(  # noqa: E731
        lhs, rhs, "x", dimension=0, config=CONFIG, implementation="fused"
    )
    mapped = jax.shard_map(gathers, mesh=mesh(), in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    with emulate(cores=2), jax.disable_jit():
        out = mapped(lhs, rhs)
    np.testing.assert_allclose(np.asarray(out, np.float32), lhs.astype(jnp.float32) @ rhs, rtol=2e-2, atol=2e-2)


def test_operands_on_different_devices_are_refused():
    lhs = jax.device_put(draw(0, M, K).astype(jnp.bfloat16), jax.devices()[1])
    free = draw(1, K, N).astype(jnp.bfloat16)  # Not put anywhere, so it may move.
    rhs = jax.device_put(free, jax.devices()[0])
    product = functools.partial(overlap.matmul, config=CONFIG, implementation="fused")
    with emulate(cores=2):
        refusal = r"`rhs` must be on the same devices as `lhs` \(.*1\), got \(.*0\): move"
        mapped, loss = jax.vmap(product), lambda lhs, rhs: product(lhs, rhs).sum()
        for call in (product, lambda lhs, rhs: mapped(lhs[None], rhs[None]), jax.grad(loss)):
            with pytest.raises(ValueError, match=refusal):
                call(lhs, rhs)
        assert product(lhs, free).devices() == {jax.devices()[1]}
        # As constants of a compiled program they may lie anywhere, as in `lhs @ rhs`.
        np.testing.assert_array_equal(jax.jit(lambda: product(lhs, rhs))(), product(lhs, free))


def test_products_in_f32_have_a_configuration_that_fits():
    """An activation's derivative and a batch of vectors need f32 results, which take more shared memory."""
    config = overlap.Config(tile_m=128, tile_n=256, stages=4)
    lhs, rhs, bias = draw(0, M, K).astype(jnp.bfloat16), draw(1, K, 512).astype(jnp.bfloat16), draw(2, 2, 512)
    product = functools.partial(overlap.matmul, lhs, rhs, config=config, implementation="fused")
    with emulate(cores=2):
        out = jax.vmap(lambda bias: product(bias=bias))(bias)
        d = jax.grad(lambda bias: product(bias=bias, activation=jnp.tanh).astype(jnp.float32).sum())(bias[0])
    exact = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact + bias[:, None], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(d, (1 - np.tanh(exact + bias[0]) ** 2).sum(0), rtol=2e-2, atol=2e-2)


def test_a_wrong_configuration_is_an_error_where_xla_runs_too():
    lhs, rhs = draw(0, M, K).astype(jnp.bfloat16), draw(1, K, N).astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="`tile_n` must be a multiple of"):
        overlap.matmul(lhs, rhs, config=overlap.Config(tile_n=24))


def test_fields_of_a_configuration_can_be_replaced():
    config = overlap.Config(chunk_buffers=4, tile_n=128)
    assert overlap.Config(tile_n=128).replace(chunk_buffers=4) == config
    with pytest.raises(TypeError, match="tile_x"):
        config.replace(tile_x=1)


def test_what_is_public_is_what_shows():
    assert dir(overlap) == sorted(overlap.__all__)
    assert all(hasattr(overlap, name) for name in overlap.__all__)
