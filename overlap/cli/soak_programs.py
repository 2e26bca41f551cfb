"""The programs of `python -m overlap soak`: many fused launches, whose results are compared with exact numbers.

All operands are whole numbers, and so small that each element of one device's product is exact in every dtype used.
Sums over devices are computed in f32, where they are exact, and rounded once. So a right result has the bits of the
expected result, in whatever order it was computed. XLA computes the expected result from operands that every device
holds completely. So the expected result depends on no communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.problem import Problem, default_out_dtype
from overlap.collectives.rows.mlp import expert_mlp
from overlap.kernels.operations import BY_NAME, Layout
from overlap.kernels.target import current_target
from overlap.tuning.operations import AXIS, shapes, specs

# About how long a turn of the loop in `spin` takes.
_US_PER_TURN = 18.0
# How many random numbers the operands are cut from: a prime, so that no two rows are equal.
_POOL = 65521
_F16 = "float16"
_BF16 = "bfloat16"
_F8 = "float8_e4m3fn"
# A mesh axis, or several mesh axes.
type Axis = str | tuple[str, ...]
# Pairs of a result and the expected result.
type Results = list[tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation and its sizes, to be run along an axis of a mesh of D devices.

    Attributes:
      name: the name in messages.
      op: the name of the operation.
      sizes: m, n and k as in `Problem`; but where products are summed, the scattered size is that of one device's part
        of the sum, and m of one part in D if all devices get the sum.
      dtype: the dtype of the operands.
      layout: how the operands are stored.
      options: keywords of the operation.
      config: fields of the kernel's configuration; None: the library chooses one.
      scaled: whether each row of the left operand has a scale.
      sides: whether there are two right operands, and the gathered operand is a result.
      beside: whether one of XLA's collectives may run at the same time.
    """

    name: str
    op: str
    sizes: tuple[int, int, int]
    dtype: str = _BF16
    layout: Layout = "nn"
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    config: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
    scaled: bool = False
    sides: bool = False
    beside: bool = True

    def problem(self, devices: int) -> Problem:
        """The problem on a number of devices."""
        sizes = dict(zip("mnk", self.sizes, strict=True))
        spec = BY_NAME[self.op]
        if spec.sums:
            sizes[spec.scatters or "m"] *= devices
        out_dtype = self.options.get("preferred_element_type") or default_out_dtype(self.dtype)
        return Problem(self.op, sizes["m"], sizes["n"], sizes["k"], self.dtype, out_dtype, devices, self.layout)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer of experts, and the gradient of its last weights. Each token chooses two experts.

    All values but the result and the gradient are whole numbers of at most 2 · hidden, or twice such a number; both are
    exact in bfloat16.
    Other gradients are left out: that of the tokens has parts that are rounded before they are added.

    Attributes:
      name: the name in messages.
      tokens: of each device.
      hidden: features of the tokens.
      width: features inside an expert.
      experts: of each device.
      as_layer: whether it is computed as `layers.ExpertMLP` computes it, with a result and a gradient in bfloat16. So
        that the result is exact, too, each column of the last weights has one number.
      beside: whether one of XLA's collectives may run at the same time.
    """

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int = 2
    as_layer: bool = False
    beside: bool = True


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A gate whose values are small whole numbers. It shows whether its arguments were mixed up."""
    return gate - jax.nn.relu(up)


def exact(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Computes a product by XLA, in f32."""
    return lax.dot(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _results_of_experts(case: Experts, axis: Axis, pools: tuple[jax.Array, jax.Array], late: jax.Array) -> Results:
    """As `_results`, for a layer of experts. What is expected comes from one product with all experts, and its VJP."""
    size = lax.axis_size(axis)
    me = lax.axis_index(axis)
    experts = size * case.experts
    tokens = size * case.tokens
    shapes = (tokens, case.hidden), *((experts, case.hidden, case.width),) * 2, (experts, case.width, case.hidden)
    # Each array begins 977 numbers after the one before, so that no two have equal numbers at equal places.
    x, w_gate, w_up, w_down = (
        jnp.resize(jnp.roll(pools[i > 0], 977 * i), shape).astype(jnp.bfloat16) for i, shape in enumerate(shapes)
    )
    if case.as_layer:
        w_down *= jnp.arange(case.width)[:, None] == jnp.arange(case.hidden) % case.width
    cotangent = jnp.resize(pools[1], x.shape).astype(jnp.float32)
    # For each token a number from 0 to 80, whose digits in base 3 are four numbers of a pool, plus 1. It says which
    # expert the token chooses first, and how much further on the second one is: at least 1, so that they differ.
    digits = jnp.resize(pools[0], (tokens, 4)).astype(jnp.int32) + 1
    drawn = (digits * jnp.array([27, 9, 3, 1])).sum(1)
    further = 1 + drawn // experts % (experts - 1)
    ids = jnp.stack([drawn, drawn + further], 1) % experts
    # Gates are 1 or 2, so that they round nothing. They change after every third, so that a token's two may differ.
    gates = 1 + (jnp.arange(2 * tokens).reshape(tokens, 2) // 3 % 2).astype(jnp.float32)

    def own(array: jax.Array) -> jax.Array:
        """This device's part of an array, available when the device's delay is over (`late`): ids at once."""
        part = lax.dynamic_slice_in_dim(array, me * (len(array) // size), len(array) // size)
        return part if array is ids else (part.astype(jnp.float32) + late).astype(array.dtype)

    def layer(w_down: jax.Array) -> jax.Array:
        """What is tested: this device's part of the result. Only the gradient of `w_down` is compared (`Experts`)."""
        # No kernel has run on a Blackwell GPU yet: there XLA computes the layer.
        how: dict[str, Any] = {"implementation": "xla" if current_target().is_blackwell else "fused"}
        if case.as_layer:
            routing = overlap.route(own(ids), experts, axis, gates=own(gates))
            weights = {"gate": own(w_gate), "up": own(w_up), "down": w_down}
            return expert_mlp(own(x), weights, routing, axis, activation=gated, **how)
        routing = overlap.route(own(ids), experts, axis)
        h = overlap.all_gather_lhs_grouped_matmul(
            own(x), [own(w_gate), own(w_up)], routing, axis, activation=gated, **how
        )
        return overlap.grouped_matmul_reduce_scatter(
            h, w_down, own(gates), routing, axis, preferred_element_type=jnp.float32, **how
        )

    def dense(w_down: jax.Array) -> jax.Array:
        """What is expected, of all devices. Every token passes all experts, side by side as one wide MLP."""
        # The features of experts that a token has not chosen are zero.
        gate, up = (jnp.einsum("th,ehi->tei", x, w, preferred_element_type=jnp.float32) for w in (w_gate, w_up))
        shares = jnp.where(ids[..., None] == jnp.arange(experts), gates[..., None], 0).sum(1)
        return exact((gated(gate, up) * shares[..., None]).reshape(tokens, -1), w_down.reshape(-1, case.hidden))

    out, pull = jax.vjp(layer, own(w_down))
    expected, pull_dense = jax.vjp(dense, w_down)
    # A zero, since no result is NaN. With it the backward pass begins when the result is there.
    after = jnp.where(jnp.isnan(out[:1, :1]), 1.0, 0.0)
    (found,) = pull((own(cotangent) + after).astype(out.dtype))
    (right,) = pull_dense(cotangent)
    return [(out, own(expected).astype(out.dtype)), (found, own(right).astype(found.dtype))]


def _results(case: Case | Experts, axis: Axis, pools: tuple[jax.Array, jax.Array], late: jax.Array) -> Results:
    """Runs the operation on this device's shards, and computes what it should return from the whole operands."""
    if isinstance(case, Experts):
        return _results_of_experts(case, axis, pools, late)
    size = lax.axis_size(axis)
    me = lax.axis_index(axis)
    spec = BY_NAME[case.op]
    problem = case.problem(size)

    def own(array: jax.Array, sharding: P) -> jax.Array:
        """This device's shard of an array."""
        for dimension in (index for index, name in enumerate(sharding) if name == AXIS):
            count = array.shape[dimension] // size
            array = lax.dynamic_slice_in_dim(array, me * count, count, dimension)
        return array

    whole = []
    shards = []
    for pool, shape, sharding in zip(pools, shapes(problem), specs(problem), strict=False):
        total = tuple(count * (size if name == AXIS else 1) for count, name in zip(shape, sharding, strict=True))
        whole.append(jnp.resize(pool, total).astype(case.dtype))
        shards.append((own(whole[-1], sharding).astype(jnp.float32) + late).astype(case.dtype))
    keywords: dict[str, Any] = {**case.options, **dict([spec.keyword] if spec.keyword else [])}
    if case.config is not None:
        tile_m = 128 if current_target().is_blackwell else 64
        keywords["config"] = overlap.Config(tile_m=tile_m, tile_n=128, **case.config)
    expected = exact(
        whole[0].T if problem.transpose_lhs else whole[0], whole[1].T if problem.transpose_rhs else whole[1]
    )
    if case.scaled:
        # Neighbouring rows have different scales, so that a result shows whether rows were mixed up. The scales are
        # powers of two, so that scaling does not round.
        scales = jnp.exp2((jnp.arange(expected.shape[0]) % 5).astype(jnp.float32) - 2)[:, None]
        expected *= scales
        keywords["lhs_scale"] = own(scales, P(AXIS, None))
    expected = own(expected, specs(problem)[2]).astype(problem.out_dtype)
    rhs = [shards[1][:, :64], shards[1][:, 64:]] if case.sides else shards[1]
    out = spec.load_function()(
        shards[0], rhs, axis, transpose_lhs=problem.transpose_lhs, transpose_rhs=problem.transpose_rhs,
        implementation="fused", **({"return_gathered": True} if case.sides else {}), **keywords,
    )  # fmt: skip
    if case.sides:
        (first, second), gathered = out
        return [(first, expected[:, :64]), (second, expected[:, 64:]), (gathered, whole[0])]
    return [(out, expected)]


_GATHER = "all_gather_lhs_matmul"
_SCATTER = "matmul_reduce_scatter"
_REDUCE = "matmul_all_reduce"
CASES: tuple[Case | Experts, ...] = (
    Case("rows", _GATHER, (128, 256, 256), _F16),
    Case("ragged rows", _GATHER, (200, 264, 136)),
    Case("few rows", _GATHER, (16, 256, 512)),
    Case("rows by the ring", _GATHER, (128, 128, 192), options={"transport": "ring"}, beside=False),
    Case("several sides, gathered", _GATHER, (72, 136, 128), sides=True),
    Case("scaled float8", _GATHER, (64, 128, 128), _F8, "nt", scaled=True),
    Case("few scaled float8", _GATHER, (8, 128, 256), _F8, "nt", scaled=True),
    Case("weights along k", "all_gather_rhs_matmul_k", (96, 128, 64)),
    Case("weights along n", "all_gather_rhs_matmul_n", (96, 64, 128)),
    Case("sums by rows", _SCATTER, (136, 264, 128)),
    Case("sums by few rows", _SCATTER, (8, 256, 64)),
    Case("sums by the ring", _SCATTER, (72, 136, 64), options={"transport": "ring"}),
    Case("sums by columns", "matmul_reduce_scatter_n", (136, 72, 72), _F16, "tn",
         {"preferred_element_type": "float32"}),
    # 136 columns are 17 units of 16 bytes, which no D divides; 384 are 48, which 2, 3, 4, 6 and 8 divide.
    Case("sums for all by rows", _REDUCE, (72, 136, 64), config={"chunk_bytes": 4096}),
    Case("sums for all by columns", _REDUCE, (8, 384, 64), _F16, config={}),
    Case("sums for all in one shot", _REDUCE, (8, 136, 72), config={"one_shot": True}),
    Experts("experts", tokens=40, hidden=128, width=72),
    # So many that tokens arrive while their rows are multiplied, on 3 to 8 devices.
    Experts("layer of experts", tokens=256, hidden=128, width=64, as_layer=True),
)  # fmt: skip


def meshes(devices: list[Any]) -> Iterator[Mesh]:
    """Yields meshes of all devices: with one axis, and with two axes in each possible shape; each also permuted."""
    count = len(devices)
    shapes: list[dict[str, int]] = [{"x": count}]
    shapes += [{"x": side, "y": count // side} for side in range(2, count) if count % side == 0]
    for shape in shapes:
        for order in (devices, [*devices[1::2], *devices[::2]]):
            array = np.array(order, dtype=object).reshape(tuple(shape.values()))
            yield Mesh(array, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def axes_of(mesh: Mesh) -> list[Axis]:
    """The axes along which an operation can run: each axis, and all axes together."""
    names = list(mesh.axis_names)
    return names if len(names) == 1 else [*names, tuple(names)]


def spin(microseconds: jax.Array) -> jax.Array:
    """Keeps this device busy for about `microseconds`. Returns a zero that depends on this work."""
    turns = (microseconds / _US_PER_TURN).astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))


@functools.cache
def program(case: Case | Experts, mesh: Mesh, axis: Axis, steps: int) -> Callable[..., jax.Array]:
    """A jitted function that runs `steps` launches of a case in a loop.

    Its arguments are (late_us, period, *arrays): a delay for each device, and the arrays that `operands` returns. In
    every `period`-th launch, each device is late by its `late_us`. A sum along all other axes of the mesh may run at
    the same time. The function returns how many results had a wrong bit, added up over the devices.
    """
    others = tuple(name for name in mesh.axis_names if name != axis and name not in axis)

    def run(late_us: jax.Array, period: jax.Array, *pools: jax.Array) -> jax.Array:
        """The program of one device: its own delay, [1], and the arguments that all devices share."""

        def launch(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            wrong, beside = state
            late = spin(jnp.where(i % period == period - 1, late_us[0], 0.0))
            first, second = (jnp.roll(pool, i) for pool in pools)
            if others and case.beside:
                beside = beside + lax.psum(first[:512].astype(jnp.float32), others).sum()
            for out, expected in _results(case, axis, (first, second), late):
                wrong += jnp.any(out != expected).astype(jnp.int32)
            return wrong, beside

        wrong, beside = lax.fori_loop(0, steps, launch, (jnp.int32(0), jnp.float32(0)))
        # The sum beside the launches is whole, so never NaN. But if nothing read it, XLA would leave it out.
        return lax.psum(wrong + jnp.isnan(beside).astype(jnp.int32), mesh.axis_names)

    every = tuple(mesh.axis_names)
    given = (P(every), P(), P(), P())
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=P(), check_vma=False))


def operands(mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """The numbers from which all operands are cut, the same on all devices: −1, 0 and 1."""
    chance = np.random.default_rng(seed)
    first, second = (on_all(mesh, P(), chance.integers(-1, 2, _POOL).astype(jnp.bfloat16)) for _ in range(2))
    return first, second


def on_all(mesh: Mesh, spec: P, values: np.ndarray) -> jax.Array:
    """An array with sharding `spec`, from values that each process has completely."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])
