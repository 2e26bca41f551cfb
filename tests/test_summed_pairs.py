"""Sums of the products of several pairs, and passengers gathered beside a sum: numbers, derivatives, defects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover
from overlap.collectives.communicator import Communicator
from overlap.collectives.reduce import blocks_kernel, blocks_operands
from overlap.collectives.reduce.passenger import Passenger
from overlap.emulation import EmulationError, emulate
from overlap.kernels.hooks import ByKStep, OneOf
from overlap.primitives import copies, wait_stores_read
from tests import assembly
from tests.explained import answer
from tests.oracle import make_mesh
from tests.product_cases import in_f32
from tests.protocol_cases import Kernel
from tests.scatter_cases import BF16, EVERY, EVERYWHERE, F16, F32, SMALL, Layer, assert_close, check, struct
from tests.test_rhs_protocol import pull_last
from tests.test_scatter_derivatives import TRANSFORMED, of_both

ONE_SHOT, BATCH = SMALL.replace(one_shot=True), (2,)

# --- Sums of pairs ----------------------------------------------------------------------------------------------------

PAIRS = [  # devices, layer, m, n, leading dimensions, extras, dtype, config
    (2, Layer("m", pairs=(64, 64)), 128, 136, (), (), BF16, SMALL),
    (3, Layer("m", pairs=(8, 72, 16), transpose_rhs=True, dtype=BF16), 192, 72, (), (*EVERY, "addend"), BF16, SMALL),
    (2, Layer("n", pairs=(72, 136), transpose_lhs=True), 136, 272, (), EVERY, F16, SMALL),
    (4, Layer("m", pairs=(136, 8), activation=jax.nn.relu), 256, 128, BATCH, ("bias",), BF16, SMALL),
    (2, Layer("m", pairs=(72, 8), transport="ring"), 128, 136, (), (), F16, SMALL),
    (3, Layer(EVERYWHERE, pairs=(64, 72, 8), dtype=BF16), 192, 72, (), EVERY, BF16, SMALL),
    (4, Layer(EVERYWHERE, pairs=(72, 64), transpose_rhs=True), 24, 136, (), ("addend",), F16, ONE_SHOT),
    (1, Layer("m", pairs=(8, 72), transpose_lhs=True, transpose_rhs=True), 64, 72, (), EVERY, F16, SMALL),
]


@pytest.mark.parametrize(
    ("devices", "layer", "m", "n", "lead", "extras", "dtype", "config"),
    PAIRS,
    ids=lambda x: x.along if isinstance(x, Layer) else "",
)
def test_numbers(devices, layer, m, n, lead, extras, dtype, config):
    arrays = layer.integers(devices, m, n, sum(layer.pairs), extras=extras, lead=lead, dtype=dtype)
    mesh = make_mesh(x=devices)
    if devices > 1:
        check(layer, mesh, arrays, config=config, completion="late")
    for implementation in ("fused", "xla"):
        with emulate(cores=2):
            results = layer.mapped(mesh, arrays, functools.partial(layer, implementation=implementation))(arrays)
        assert_close(results, layer.mapped(mesh, arrays, layer.plain)(arrays))


@pytest.mark.parametrize(("how", "along"), [("vjp", "m"), ("jvp of grad", EVERYWHERE), ("grad of grad", "m")])
def test_derivatives_of_pairs(how, along):
    layer = Layer(along, pairs=(8, 8), activation=None if how == "vjp" else jnp.tanh)
    arrays = layer.integers(2, 16, 16, 16, extras=() if how == "vjp" else EVERY, dtype=F16)
    arrays = {name: (x * 0.25).astype(x.dtype) for name, x in arrays.items()}
    assert_close(*of_both(layer, arrays, TRANSFORMED[how], check_vma=along != "m"))


def test_vmap_of_pairs():
    layer = Layer("m", pairs=(8, 16), transpose_rhs=True)
    arrays = layer.integers(2, 64, 72, 24, lead=(3,), dtype=F16)

    def mapped(arrays):
        rest = {name: x for name, x in arrays.items() if name != "lhs"}
        return jax.vmap(lambda lhs: layer({"lhs": lhs, **rest}))(arrays["lhs"])

    ours, theirs = (layer.mapped(make_mesh(x=2), arrays, f, P(None, "x", None)) for f in (mapped, layer.plain))
    with emulate(cores=2) as run:
        assert_close(ours(arrays), theirs(arrays))
    assert run.counts["launches"] > 0


A, B = struct(128, 64), struct(64, 256)
WRONG = [  # lhs, rhs, what the message must contain
    ([A, A], B, ["lists of equal length", "list of 2", "one array"]),
    ([A, A], [B], ["list of 2", "list of 1"]),
    ([], [], ["list of 0"]),
    ([A, A], [B, struct(32, 256)], ["pair 1 of 2", "k=64", "k=32"]),
    ([A, struct(64, 64)], [B, B], ["`lhs`", "rows", "(64, 64)", "lhs[1]", "only k"]),
    ([A, A], [B, struct(64, 128)], ["`rhs`", "columns", "(64, 128)", "rhs[1]"]),
    ([A, struct(2, 128, 64)], [B, B], ["leading dimensions", "(2, 128, 64)"]),
    ([A, struct(128, 64, dtype=F16)], [B, struct(64, 256, dtype=F16)], ["dtype", "float16", "bfloat16"]),
    ([A, 1], [B, B], ["lhs[1]", "array", "int"]),
]


def test_pairs_where_nothing_is_added():
    with pytest.raises(ValueError, match=r"`lhs` of .* must be one array, got a list of 2: only `matmul_reduce_sc"):
        answer(overlap.all_gather_lhs_matmul, [A, A], [B, B], "x", mesh=make_mesh(x=2))


@pytest.mark.parametrize(("lhs", "rhs", "message"), WRONG)
@pytest.mark.parametrize("op", [overlap.matmul_reduce_scatter, overlap.matmul_all_reduce])
def test_wrong_pairs(op, lhs, rhs, message):
    with pytest.raises(ValueError) as caught:
        answer(op, lhs, rhs, "x", mesh=make_mesh(x=2))
    assert all(part in str(caught.value) for part in message), caught.value


def test_the_kernel_needs_rows_of_16_bytes_of_every_pair():
    with pytest.raises(NotImplementedError, match="k=60"):
        given = [A, struct(128, 60)], [B, struct(60, 256)]
        answer(overlap.matmul_reduce_scatter, *given, "x", mesh=make_mesh(x=2), implementation="fused")


# --- Passengers: the gradient of several products with one gathered operand -------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of `all_gather_lhs_matmul` with several right operands; sizes are per shard."""

    m: int
    k: int
    widths: tuple[int, ...]
    lead: tuple[int, ...] = ()
    transpose_rhs: bool = False
    dtype = F16

    def arrays(self, devices, seed=0):
        chance, rows = np.random.default_rng(seed), devices * self.m
        sides = [(self.k, devices * n) for n in self.widths]
        shapes = [(*self.lead, rows, self.k), *(s[::-1] if self.transpose_rhs else s for s in sides)]
        shapes += [(*self.lead, rows, devices * n) for n in self.widths]
        x, *rest = (jnp.asarray(chance.integers(-2, 3, shape), self.dtype) for shape in shapes)
        return x, rest[: len(self.widths)], rest[len(self.widths) :]

    @property
    def specs(self):
        lead = (None,) * len(self.lead)
        return P(*lead, "x", None), P("x", None) if self.transpose_rhs else P(None, "x"), P(*lead, None, "x")

    def mapped(self, mesh, function, around=lambda f: f):
        def gradient(x, weights, d_outs):
            f = around(functools.partial(function, transpose_rhs=self.transpose_rhs))
            return jax.vjp(f, x, weights)[1](d_outs)

        specs = self.specs
        return jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False))


def plain(x, weights, transpose_rhs):
    rows = lax.all_gather(x, "x", axis=x.ndim - 2, tiled=True).astype(F32)
    return [
        jnp.matmul(rows, (w.T if transpose_rhs else w).astype(F32), precision="highest").astype(x.dtype)
        for w in weights
    ]


fused = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="fused")
SHORT = Gradient(64, 128, (64, 40))


def kernel_of(form, devices, around=lambda f: f, seed=0):
    """Returns the kernel of a gradient, and how to check every bit of it."""
    mesh, arrays = make_mesh(x=devices), form.arrays(devices, seed)
    expected = form.mapped(mesh, plain)(*arrays)

    def check(results):
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(in_f32(a), in_f32(b))

    ours = form.mapped(mesh, fused, around)
    return Kernel(lambda: ours(*arrays), check)


def scanned(f):
    return lambda x, weights: lax.scan(lambda x, _: (x, f(x, weights)), x, None, length=1)[1]


FORMS = [  # devices, form, what is around the product
    (2, Gradient(64, 128, (64, 40, 8)), None),
    (3, Gradient(24, 72, (72, 16), transpose_rhs=True), None),
    (4, Gradient(16, 136, (24,)), jax.checkpoint),
    (2, Gradient(32, 64, (40, 64), lead=(3,)), None),
    (8, Gradient(8, 64, (16, 8)), None),
]


@pytest.mark.parametrize(("devices", "form", "around"), FORMS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_gradient_is_one_kernel(devices, form, around):
    kernel = kernel_of(form, devices, around or (lambda f: f))
    for seed, completion in enumerate(("late", "random", "eager")[: 3 if devices < 4 else 1]):
        run = kernel.run(cores=2, completion=completion, seed=seed)
        # Nothing uses the results of the forward pass here. The other launch is the sum, with its passenger.
        assert run.counts["launches"] == 1


def test_a_gradient_of_a_gradient():
    form = Gradient(16, 64, (24, 8))

    def twice(function):
        def loss(x, weights, d_outs):
            outs = jax.vjp(functools.partial(function, transpose_rhs=False), x, weights)[1](d_outs)
            return sum((jnp.sin(out.astype(F32)) ** 2).sum() for out in jax.tree.leaves(outs))

        return jax.shard_map(
            jax.grad(loss, (0, 1, 2)), mesh=make_mesh(x=2), in_specs=form.specs, out_specs=form.specs, check_vma=False
        )

    arrays = jax.tree.map(lambda x: x * jnp.asarray(0.125, x.dtype), form.arrays(2))
    with emulate(cores=2):
        assert_close(jax.jit(twice(fused))(*arrays), jax.jit(twice(plain))(*arrays))


def test_a_gradient_that_is_wanted_in_f32():
    """`jax.vmap` adds up in f32 what its elements share. Chunk buffers would then have another dtype than the rows."""
    form = Gradient(16, 64, (24,))

    def of_directions(function):
        def loss(d_x, d_w, x, weights, d_outs):
            def tangent(factor):
                of_both = lambda x, w: function(x, [w], transpose_rhs=False)[0]  # noqa: E731
                return jax.jvp(of_both, (x, weights[0]), (d_x, d_w * factor))[1]

            return (jax.vmap(tangent)(jnp.arange(3, dtype=F16)).astype(F32) * d_outs[0]).sum()

        body = lambda x, weights, d_outs: jax.grad(loss, (0, 1))(x, weights[0], x, weights, d_outs)  # noqa: E731
        specs = form.specs
        return jax.shard_map(body, mesh=make_mesh(x=2), in_specs=specs, out_specs=specs[:2], check_vma=False)

    arrays = jax.tree.map(lambda x: x * jnp.asarray(0.125, x.dtype), form.arrays(2))
    with emulate(cores=2) as run:
        assert_close(jax.jit(of_directions(fused))(*arrays), jax.jit(of_directions(plain))(*arrays))
    assert run.counts["launches"] > 0


@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, monkeypatch):
    pull_last(monkeypatch, victim, devices=3)
    kernel_of(SHORT, 3).run(cores=2, completion="late", seed=victim)


H100S = AbstractMesh(
    (2,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
)


@pytest.mark.parametrize(("gain", "implementation"), [(1.2, "fused"), (0.9, "xla")])
def test_the_backward_pass_is_explained_and_chosen_for_itself(gain, implementation, monkeypatch):
    def verdict(problem, gpu):
        ratio = gain if problem.op == "matmul_reduce_scatter" else 1.2
        return crossover.Verdict(ratio < 1, f"{problem} {ratio}", crossover.Cause.MEASURED)

    monkeypatch.setattr(crossover, "verdict", verdict)
    x, q, k = struct(4096, 8192), struct(8192, 4096), struct(8192, 512)

    def explained(op, lhs, rhs, **more):
        def loss(lhs, rhs):
            out = op(lhs, rhs, preferred_element_type=BF16, **more)
            return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

        return overlap.explain(jax.grad(loss, (0, 1)), lhs, rhs, mesh=H100S)

    answers = explained(overlap.all_gather_lhs_matmul, x, [q, k, k], axis_name="x")
    forward, backward = answers
    assert forward.implementation == "fused" and backward.implementation == implementation
    assert "8192x8192x5120" in backward.reason and "`lhs` gathered beside it" in backward.plan
    header, *rows = str(answers).splitlines()
    assert header.startswith("calls") and [row.split()[1] for row in rows] == [x.op for x in answers]
    assert len(explained(overlap.matmul_all_reduce, x, k, axis_name="x")) == 1
    forward, *backward = explained(overlap.matmul, x, k)
    assert {(x.op, x.implementation, x.plan) for x in backward} <= {("matmul", "fused", "backward pass")}
    assert len(backward) == (2 if forward.implementation == "fused" else 0)


def test_equal_calls_are_one_row_and_jitted_ones_are_traced_again():
    x = struct(512, 512)
    twice = jax.jit(lambda x: overlap.matmul(overlap.matmul(x, x), x))
    for _ in range(2):
        answers = overlap.explain(twice, x)
        assert len(answers) == 2 and str(answers).splitlines()[1].split()[:4] == [
            "2",
            "matmul",
            "512x512x512",
            "bfloat16",
        ]
    assert str(overlap.explain(jnp.tanh, x)) == "no call of an operation of this library"


# --- Each defect gives a report or wrong numbers ----------------------------------------------------------------------


def of_pair(change):
    """Changes what a k step of a pair loads: `change(refs, which, k)` returns these three."""

    def defect(patch):
        def where(refs, steps):
            found = blocks_operands.of_pairs(refs, steps)

            def changed(k_step):
                one, k = found.where(k_step)
                refs, which, k = change(one.refs, one.which, k)
                return OneOf(refs, which), k

            return ByKStep(changed) if len(refs) > 1 else found

        patch.setattr(blocks_kernel, "of_pairs", where)

    return defect


def of_steps(change):
    def defect(patch):
        patch.setattr(blocks_kernel, "k_steps", lambda *args: change(blocks_operands.k_steps(*args)))

    return defect


def of_passenger(**changes):
    """Changes fields of the passenger's `Chunks`: `change(field)`."""
    return lambda patch: patch.setattr(
        Passenger,
        "chunks",
        lambda *args, make=Passenger.chunks: (
            lambda made: dataclasses.replace(made, **{name: f(getattr(made, name)) for name, f in changes.items()})
        )(make(*args)),
    )


def of_method(name, method):
    return lambda patch: patch.setattr(Communicator, name, method)


def run_without_counting_others(self):
    whole, carried = Communicator._copy_others, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_copy_others", lambda self: (carried.append(whole(self)), 0)[1])
        RUN(self)


def copy_others_before_peers_have_begun(self):
    others = dataclasses.replace(self, others=None)
    self._copy_others()
    RUN(others)


RUN, COPY_OTHERS = Communicator.run, Communicator._copy_others
in_shard = lambda f: lambda place: lambda shard, *where: place(f(*shard), *where)  # noqa: E731
DEFECTS = {
    "the first pair again": of_pair(lambda refs, which, k: (refs, which * 0, k)),
    "pairs in another order": of_pair(lambda refs, which, k: (refs[::-1], which, k)),
    "k not counted from the pair's first step": of_pair(lambda refs, which, k: (refs, which, k + which * 64)),
    "a k step too early": of_pair(lambda refs, which, k: (refs, which, jnp.maximum(k - 64, 0))),
    "no last step": of_steps(lambda steps: [*steps[:-1], steps[-1] - 1]),
    "a step of the first pair too few": of_steps(lambda steps: [steps[0] - 1, *steps[1:]]),
    "the last pair left out": of_steps(lambda steps: steps[:-1]),
    "own rows left out": of_passenger(count=lambda count: count // 3 * 2),
    "the last chunk left out": of_passenger(count=lambda count: count - 1),
    "a chunk of another device": of_passenger(source=in_shard(lambda owner, batch: ((owner + 1) % 3, batch))),
    "rows of another device's place": of_passenger(destination=in_shard(lambda owner, batch: ((owner + 1) % 3, batch))),
    "every row of the first batch element": of_passenger(source=in_shard(lambda owner, batch: (owner, 0))),
    "every second chunk twice": of_passenger(at=lambda at: lambda index: at(index // 2 * 2)),
    "before the peers have begun": of_method("run", copy_others_before_peers_have_begun),
    "peers may leave while their rows are read": of_method("run", run_without_counting_others),
    "too many announced": of_method("_copy_others", lambda self: COPY_OTHERS(self) + 1),
    "too few announced": of_method("_copy_others", lambda self: COPY_OTHERS(self) - 1),
    "never copied": of_method("_copy_others", lambda self: 0),
    "landing not awaited": lambda patch: patch.setattr(copies, "wait_stores_landed", wait_stores_read),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_shows(defect, monkeypatch):
    DEFECTS[defect](monkeypatch)
    kernel = kernel_of(Gradient(16, 128, (136, 72), lead=(2,)), 3)
    with pytest.raises((EmulationError, AssertionError)):
        for seed, completion in enumerate(("late", "eager", "random")):
            kernel.run(cores=2, scheduler="pct", seed=seed, completion=completion, step_limit=200_000)


# --- Assembled --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(assembly.unavailable_reason()), reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("target", "processes"), [("h200", 2), ("b200", 1)])
def test_a_gradient_assembles_without_spills(target, processes):
    shape = 4096, 14336, 8192
    case = assembly.Case("tests.assembly_products:gradient", 2, shape, "bf16", target, processes=processes)
    report = assembly.assemble_case(case)[-1]
    assert (report.name, report.spills, report.stack_frame_bytes) == ("overlap_matmul_reduce_scatter_m", 0, 0)
