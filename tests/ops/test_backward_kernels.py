"""The kernels of the gathers' backward passes: one sum of several products, beside which the rows travel once more.

tests/protocol injects defects into them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

import overlap
from overlap.choice import crossover
from tests.ops.contract import BF16, F16, F32, Call, assert_close, running, struct
from tests.ops.derivative_cases import TRANSFORMED, of_both
from tests.ops.gradient_cases import Gradient, fused, plain, runner
from tests.oracle import make_mesh


def scanned(f):
    def run(x, weights):
        outs = lax.scan(lambda x, _: (x, f(x, weights)), x, None, length=1)[1]
        return jax.tree.map(lambda out: out[0], outs)

    return run


FORMS = [  # devices, form, what is around the product
    (2, Gradient(64, 128, (64, 40, 8)), None),
    (3, Gradient(24, 72, (72, 16), lead=(3,), transpose_rhs=True), scanned),
    (2, Gradient(16, 136, (24,)), jax.checkpoint),
    pytest.param(8, Gradient(8, 64, (16, 8)), None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("devices", "form", "around"), FORMS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_gradient_is_one_kernel(devices, form, around):
    run = runner(form, devices, around or (lambda f: f))
    for seed, completion in enumerate(("late", "random")):
        # Nothing uses the results of the forward pass here. The other launch is the sum, with its passenger.
        assert run(completion=completion, seed=seed).counts["launches"] == 1


# Further fields of the call, whether the result is of `return_gathered` or types are checked, number of launches: the
# product, and the cotangent of the rows, beside which the rows travel once more.
GATHERS = [
    ({"lead": (3, 1), "layout": "nt", "widths": (72, 72)}, True, 2),
    ({"keywords": (("return_gathered", True),)}, False, 2),
    ({"keywords": (("lhs_scale", 0.5),)}, False, 1),
    ({"keywords": (("transport", "ring"),)}, False, 2),
]


@pytest.mark.parametrize(("fields", "check_vma", "launches"), GATHERS, ids=str)
def test_the_gradient_gathers_by_xla_only_where_no_kernel_does(fields, check_vma, launches):
    call = Call("all_gather_lhs_matmul", 40, 72, 64, **fields)
    arrays, (rows, *_), mesh = call.normal(2), call.keywords or [("",)], make_mesh(x=2)

    def total(arrays):
        out = call(arrays)
        out = out[0] if rows[0] == "return_gathered" else out
        return sum(jnp.sin(x.astype(F32)).sum() for x in jax.tree.leaves(out))

    program = call.program(mesh, arrays, jax.grad(total), call.specs(arrays), check_vma=check_vma)
    with running() as run:
        jax.block_until_ready(program(arrays))
        # The emulator itself gathers once for each kernel.
        by_xla = program.lower(arrays).as_text().count("stablehlo.all_gather") - launches
    assert run.counts["launches"] == launches
    assert (by_xla > 0) == (rows[0] in ("lhs_scale", "transport"))


def test_a_gradient_of_a_gradient():
    form, results = Gradient(16, 64, (24, 8), lead=(2,)), []
    arrays = jax.tree.map(lambda x: x * jnp.asarray(0.125, x.dtype), form.arrays(2))
    for function in (fused, plain):

        def total(x, weights, d_outs, function=function):
            outs = jax.vjp(lambda *given: function(*given, transpose_rhs=False), x, weights)[1](d_outs)
            return sum((jnp.sin(out.astype(F32)) ** 2).sum() for out in jax.tree.leaves(outs))

        twice = jax.shard_map(
            jax.grad(total, (0, 1, 2)), mesh=make_mesh(x=2), in_specs=form.specs, out_specs=form.specs, check_vma=False
        )
        with running():
            results.append(jax.block_until_ready(jax.jit(twice)(*arrays)))
    assert_close(*results)


def test_a_gradient_that_is_wanted_in_f32():
    """`jax.vmap` adds up in f32 what its elements share. Chunk buffers would then have another dtype than the rows."""
    call = Call("all_gather_lhs_matmul", 16, 24, 64, dtype=F16)
    arrays = {name: x * x.dtype.type(0.25) for name, x in call.normal(2).items()}

    def of_directions(f, arrays):
        def total(directions):
            tangent = lambda factor: jax.jvp(  # noqa: E731
                f, (arrays,), (directions | {"rhs": directions["rhs"] * factor.astype(F16)},)
            )[1]
            return jnp.sin(jax.vmap(tangent)(jnp.arange(3.0)).astype(F32)).sum()

        return jax.grad(total)(arrays)

    assert_close(*of_both(call, arrays, of_directions), 2e-3)


@pytest.mark.one_jax
def test_vmap_of_pairs():
    call = Call("matmul_reduce_scatter", 32, 72, 24, layout="nt", pairs=(8, 16), lead=(3,), dtype=F16, out=F32)
    mapped = lambda f, arrays: jax.vmap(lambda lhs: f(arrays | {"lhs": lhs[None]})[0])(arrays["lhs"])  # noqa: E731
    single = call.but(lead=(1,))
    arrays = call.arrays(2)
    assert_close(*of_both(single, arrays, mapped), 1e-6)


@pytest.mark.one_jax
def test_pairs_twice():
    call = Call("matmul_all_reduce", 16, 16, 16, pairs=(8, 8), dtype=F16, out=F32, activation=jnp.tanh)
    arrays = {name: x * x.dtype.type(0.25) for name, x in call.normal(2).items()}
    assert_close(*of_both(call, arrays, TRANSFORMED["jvp of grad"], check_vma=True))


# --- What is chosen ---------------------------------------------------------------------------------------------------

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

    def explained(op, lhs, rhs, wanted=(0, 1), **more):
        def total(lhs, rhs):
            out = op(lhs, rhs, preferred_element_type=BF16, **more)
            return sum(x.astype(F32).sum() for x in jax.tree.leaves(out))

        return overlap.explain(jax.grad(total, wanted), lhs, rhs, mesh=H100S)

    answers = explained(overlap.all_gather_lhs_matmul, x, [q, k, k], axis_name="x")
    forward, backward = answers
    assert forward.implementation == "fused" and backward.implementation == implementation
    assert "8192x8192x5120" in backward.reason and "`lhs` gathered beside it" in backward.plan
    # The rows are gathered for the weights' gradients only.
    _, of_rows = explained(overlap.all_gather_lhs_matmul, x, [q, k, k], wanted=0, axis_name="x")
    assert of_rows.implementation == implementation and of_rows.plan == "backward pass, cotangent of `lhs`"
    header, *rows = str(answers).splitlines()
    assert header.startswith("calls") and [row.split()[1] for row in rows] == [x.op for x in answers]
    assert len(explained(overlap.matmul_all_reduce, x, k, axis_name="x")) == 1
    forward, *backward = explained(overlap.matmul, x, k)
    assert {(x.op, x.implementation, x.plan) for x in backward} <= {("matmul", "fused", "backward pass")}
    assert len(backward) == (2 if forward.implementation == "fused" else 0)
