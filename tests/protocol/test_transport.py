"""Which transport a call has and says that it has, what each needs, and that gradients go the same way."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.reduce import blocks_kernel
from overlap.emulation import emulate
from overlap.kernels.hopper import mainloop
from overlap.kernels.hopper.limits import smem_bytes
from overlap.kernels.limits import BARRIER_BYTES
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.target import SMEM_BYTES, Target
from tests.ops.contract import FORMS
from tests.oracle import make_mesh

BF16, F32 = jnp.bfloat16, jnp.float32
OPERANDS = jax.ShapeDtypeStruct((1024, 4096), BF16), jax.ShapeDtypeStruct((4096, 4096), BF16)
H200, SMALL = Target("gpu", "NVIDIA H200", 132), overlap.Config(tile_m=64, tile_n=128, stages=2)


def explain(devices=4, operation=overlap.all_gather_lhs_matmul, operands=OPERANDS, **keywords):
    (choice,) = overlap.explain(operation, *operands, "x", mesh=make_mesh(x=devices), **keywords)
    return choice


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


def test_a_call_says_which_and_why(hopper):
    default, pull, ring = explain(), explain(transport="pull"), explain(transport="ring")
    assert (default.transport, pull.transport, ring.transport) == ("pull", "pull", "ring")
    assert default.config == ring.config and default.reason == ring.reason
    of_sum = functools.partial(explain, operation=overlap.matmul_reduce_scatter, config=SMALL)
    sums = [of_sum(implementation="fused", transport=name) for name in (None, "ring")]
    assert [choice.transport for choice in sums] == ["push", "ring"] and sums[1].ctas_at_once == 1
    for choice in (default, sums[0]):
        assert "one hop" in choice.transport_reason
    for choice in (pull, ring, sums[1]):
        assert choice.transport_reason == "asked for"
        assert f"transport {choice.transport}: {choice.transport_reason}" in str(choice)
    # Without the kernel or without peers there is no transport.
    for options in ({"implementation": "xla"}, {"implementation": "fused", "devices": 1}):
        assert of_sum(transport="ring", **options).transport == ""
        choice = explain(transport="ring", **options)
        assert choice.transport == choice.transport_reason == "" and "transport" not in str(choice)
    with pytest.raises(ValueError, match=r"`transport` must be None or one of \('push', 'ring'\), got 'pull'"):
        of_sum(transport="pull")


def test_how_many_ctas_must_run_at_once(hopper):
    whole, cut = (explain(config=overlap.Config(stream_k=parts)) for parts in (1, 3))
    ring = explain(transport="ring")
    assert (whole.ctas_at_once, cut.ctas_at_once, ring.ctas_at_once) == (1, 3, ring.target.num_cores)
    assert "at the same time" not in str(whole) and f"needs {ring.ctas_at_once} CTAs at the same time" in str(ring)
    assert explain(implementation="xla").ctas_at_once == 0
    types = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 2
    pair = overlap.Config(tile_n=128, cluster=2, cluster_along="k")
    (clustered,) = overlap.explain(overlap.matmul, *types, config=pair, implementation="fused")
    assert clustered.ctas_at_once == 2
    assert explain(devices=1, transport="ring", config=overlap.Config()).ctas_at_once == 1


def test_the_ring_needs_no_chunk_buffers(hopper):
    config = overlap.Config()
    pulled, plain = (smem_bytes(config, BF16, transport) for transport in ("pull", ""))
    assert smem_bytes(config, BF16, "ring") == plain
    assert pulled - plain == config.chunk_buffers * (config.chunk_bytes + BARRIER_BYTES)
    # So a configuration may fit the ring but not pulling; all other limits are the same.
    large = overlap.Config(chunk_bytes=16384)
    assert smem_bytes(large, BF16, "pull") > SMEM_BYTES
    assert explain(config=large, transport="ring").implementation == "fused"
    with pytest.raises(ValueError, match="shared memory"):
        explain(config=large, transport="pull")
    for transport in ("pull", "ring"):
        with pytest.raises(ValueError, match="split_k"):
            explain(config=overlap.Config(split_k=2), transport=transport)


@pytest.mark.parametrize(
    ("name", "lead"), [("pull", ()), ("pull", (2,)), ("ring", ()), ("weights n", ()), ("weights k", ())]
)
def test_own_tiles_come_first_and_own_shards_are_not_copied(name, lead, monkeypatch):
    """Otherwise no transfer is hidden, or each device copies more than its peers' shards. Results do not show it."""
    launches, steps, launch = [], [], ProductKernel.launch

    def watched(kernel, inputs, out_types, body_of):
        def watched_body_of(refs):
            body = body_of(refs)
            steps.append([body.tile_at(index).step for index in range(kernel.work.tiles)])
            return body

        launches.append(out_types)
        return launch(kernel, inputs, out_types, watched_body_of)

    monkeypatch.setattr(ProductKernel, "launch", watched)
    call, devices = FORMS[name].but(lead=lead), 3
    given = call.types(devices)
    with emulate(cores=2):
        call.program(make_mesh(x=devices), given, call, call.out_specs).lower(given)
    (of_tiles,), (results,) = steps, launches
    # Where the shards lie one below the other along k, each tile begins with the own one.
    counts = [len(of_tiles)] if name == "weights k" else [len(of_tiles) // devices] * devices
    assert of_tiles == [step for step, count in enumerate(counts) for _ in range(count)]
    *_, copied, _, _ = results.scratch.shape
    assert copied == devices - 1


def test_who_sends_own_tiles_too_has_most_registers_for_it():
    """A kernel never takes more registers than at launch: 168 for each of 384 threads."""

    def registers(**exchange):
        hooks = types.SimpleNamespace(exchange=types.SimpleNamespace(**exchange) if exchange else None)
        return mainloop._registers(hooks)

    forms = [registers(), registers(own_stored=None), registers(own_stored=lambda tile: None)]
    transfer = [of_transfer for _, of_transfer in forms]
    assert transfer == sorted(set(transfer))
    assert {mainloop.COMPUTE_WARPGROUPS * compute + moved for compute, moved in forms} == {3 * 168}


# --- Gradients --------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = P("x", None), P(None, "x")
OPERATIONS = {
    "sum": (overlap.matmul_reduce_scatter, (COLUMNS, ROWS), ROWS),
    "gather": (overlap.all_gather_lhs_matmul, (ROWS, COLUMNS), COLUMNS),
    "several": (
        lambda x, a, b, axis, **how: overlap.all_gather_lhs_matmul(x, [a, b], axis, **how),
        (ROWS, COLUMNS, COLUMNS), [COLUMNS, COLUMNS],
    ),
}  # fmt: skip


def gradients(name, devices=2, **options):
    operation, in_specs, out_specs = OPERATIONS[name]
    draw = np.random.default_rng(0).integers
    operands = [draw(-2, 3, (devices * 16, devices * 32)).astype(BF16)]
    operands += [draw(-2, 3, (devices * 32, devices * 64)).astype(BF16) for _ in in_specs[1:]]

    def loss(*given):
        call = lambda *given: operation(*given, "x", **options)  # noqa: E731
        outs = jax.shard_map(call, mesh=make_mesh(x=devices), in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return sum((out.astype(F32) ** 2).sum() for out in jax.tree.leaves(outs(*given)))

    with emulate(cores=2):
        found = jax.jit(jax.grad(loss, argnums=tuple(range(len(operands)))))(*operands)
        return [np.asarray(x, np.float32) for x in found]


@pytest.fixture
def used(monkeypatch):
    """The kernels that are traced: a gather or a sum by ring, or another sum, each with the type of its result."""
    found, hook_in, launch = [], RingTransport.hook_in, blocks_kernel.launch

    def gathered(self, *args):
        found.append(("gather by ring", None))
        return hook_in(self, *args)

    def summed(operands, plan, *rest):
        how = "sum by ring" if plan.operation.transport == "ring" else "sum"
        found.append((how, plan.out_dtype))
        return launch(operands, plan, *rest)

    monkeypatch.setattr(RingTransport, "hook_in", gathered)
    monkeypatch.setattr(blocks_kernel, "launch", summed)
    return found


@pytest.mark.parametrize(
    ("name", "transport", "kernels"),
    [
        ("sum", "ring", {"sum by ring", "gather by ring"}),
        ("gather", "ring", {"sum by ring", "gather by ring"}),
        ("several", None, {"sum"}),
    ],
)
def test_gradients_go_the_same_way(name, transport, kernels, used):
    actual = gradients(name, implementation="fused", config=SMALL, transport=transport)
    assert {how for how, _ in used} == kernels
    # What several right operands add up travels in the operands' dtype, as in plain JAX.
    assert {jnp.dtype(dtype) for how, dtype in used if how.startswith("sum")} == {jnp.dtype(BF16)}
    for ours, theirs in zip(actual, gradients(name, implementation="xla"), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-2 * np.linalg.norm(theirs)
