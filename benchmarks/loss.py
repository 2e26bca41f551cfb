"""Compares the loss without logits, `overlap.linear_cross_entropy`, with what keeps logits and with what does not.

    python -m benchmarks.loss --out benchmarks/results
    python -m benchmarks.loss --models llama-8b --passes "forward and backward" --methods fused xla rows

x is [T, H], sharded by rows, and w [H, V], by columns; both bf16. The methods:

    fused    `overlap.linear_cross_entropy` by its kernels
    again    the same with a `chunk`: the backward pass computes the logits again
    chunks   the same by XLA, by chunks of the vocabulary
    xla      plain JAX: logits in bf16, the log-softmax in f32, its own derivative
    rows     the same for eight parts of the rows, one after the other: `jax.lax.map` of `jax.checkpoint`
    tokamax  its form by chunks of rows and columns, on one device (to be installed as for `benchmarks.expert_rival`)
    roof     cuBLAS: the product forward, and three of the same size with a backward pass

Each is a loop in which an element of the result is written into x before the next turn. With a backward pass the
cotangents of x and w are results. For each method the memory beside operands and results is printed. T are the tokens
of all devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import expert_rival, experts, layer_runs
from overlap.cli import ending
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of

METHODS = ("fused", "again", "chunks", "xla", "rows", "tokamax", "roof")
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Head:
    """The sizes of the last layer of a language model."""

    features: int
    vocabulary: int


MODELS = {
    "llama-8b": Head(4096, 131072),
    "llama-70b": Head(8192, 131072),
    "gemma-2b": Head(2048, 262144),
    "qwen-14b": Head(5120, 152064),
    "tiny": Head(128, 512),
}
type Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of all tokens of the devices that share the vocabulary, as one writes it inside `shard_map`."""
    z = (x @ w).astype(jnp.float32)
    largest = lax.pmax(lax.stop_gradient(z.max(axis=1)), AXIS)
    total = lax.psum(jnp.exp(z - largest[:, None]).sum(axis=1), AXIS)
    label = labels - lax.axis_index(AXIS) * w.shape[1]
    is_here = (label >= 0) & (label < w.shape[1])
    here = jnp.take_along_axis(z, jnp.where(is_here, label, 0)[:, None], axis=1)[:, 0]
    return largest + jnp.log(total) - lax.psum(jnp.where(is_here, here, 0), AXIS)


def _whole(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    found = _plain(lax.all_gather(x, AXIS, tiled=True), w, lax.all_gather(labels, AXIS, tiled=True))
    return lax.dynamic_slice_in_dim(found, lax.axis_index(AXIS) * x.shape[0], x.shape[0])


def _by_rows(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    def part(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _whole(given[0], w, given[1])

    parts = x.reshape(_PARTS, -1, x.shape[1]), labels.reshape(_PARTS, -1)
    return lax.map(jax.checkpoint(part), parts).reshape(-1)


def _by_tokamax(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    call = expert_rival.tokamax().linear_softmax_cross_entropy_loss
    return call(x, labels, w, reduction="none", implementation="chunked_xla")


def losses(chunk: int) -> dict[str, Loss]:
    """The loss of each method; `chunk`: the columns of a chunk."""
    ours = functools.partial(overlap.linear_cross_entropy, axis_name=AXIS)
    return {
        "fused": functools.partial(ours, implementation="fused"),
        "again": functools.partial(ours, implementation="fused", chunk=chunk),
        "chunks": functools.partial(ours, implementation="xla", chunk=chunk),
        "xla": _whole,
        "rows": _by_rows,
        "tokamax": _by_tokamax,
    }


def loops(tokens: int, head: Head, mesh: Mesh, methods: Sequence[str], backward: bool) -> dict[str, experts.Loop]:
    """Returns the loop of each method."""
    of = losses(max(head.vocabulary // mesh.size // 8 // 64, 1) * 64)

    def once(method: str, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        if method == "roof":
            rows = lax.all_gather(x, AXIS, tiled=True)
            z = rows @ w
            return (z[: x.shape[0], 0], z @ w.T, rows.T @ z) if backward else (z[: x.shape[0], 0], z)
        if not backward:
            return (of[method](x, w, labels),)
        loss, pull = jax.vjp(lambda x, w: of[method](x, w, labels), x, w)
        return loss, *pull(jnp.ones_like(loss))

    def program(method: str, turns: int) -> Any:
        def turn(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            x, w, labels, _, loss = state
            x = lax.dynamic_update_slice(x, jnp.clip(loss[:1, :1], -4, 4).astype(x.dtype), (0, 0))
            found, *kept = once(method, x, w, labels)
            return x, w, labels, tuple(kept), found[:, None].astype(jnp.float32)

        specs = P(AXIS), P(None, AXIS), P(AXIS), P(AXIS), P(AXIS)
        mapped = jax.shard_map(lambda *state: lax.fori_loop(0, turns, turn, state), mesh=mesh, in_specs=specs,
                               out_specs=specs, check_vma=False)  # fmt: skip
        return jax.jit(lambda state: mapped(*state), donate_argnums=0)

    def given(method: str) -> tuple[Any, ...]:
        put = lambda make, spec: jax.jit(make, out_shardings=jax.NamedSharding(mesh, spec))()  # noqa: E731
        x = put(lambda: jax.random.normal(jax.random.key(0), (tokens, head.features), jnp.bfloat16), P(AXIS))
        shape = head.features, head.vocabulary
        w = put(lambda: (0.02 * jax.random.normal(jax.random.key(1), shape)).astype(jnp.bfloat16), P(None, AXIS))
        labels = put(lambda: jax.random.randint(jax.random.key(2), (tokens,), 0, head.vocabulary), P(AXIS))
        specs = P(AXIS), P(None, AXIS), P(AXIS)
        run = jax.shard_map(lambda *a: tuple(once(method, *a)[1:]), mesh=mesh, in_specs=specs, out_specs=P(AXIS),
                            check_vma=False)  # fmt: skip
        kept = jax.tree.map(
            lambda t: put(lambda: jnp.zeros(t.shape, t.dtype), P(AXIS)), jax.eval_shape(run, x, w, labels)
        )
        return x, w, labels, kept, put(lambda: jnp.zeros((tokens, 1)), P(AXIS))

    return {name: (functools.partial(program, name), functools.partial(given, name))
            for name in methods if mesh.size == 1 or name != "tokamax"}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"models": tuple(MODELS), "methods": METHODS, "passes": layer_runs.PASSES}
    run = layer_runs.begin("loss", __doc__, choices, argv, tokens="8192", needs_xla=False)
    mesh = mesh_of(run.devices)
    asked = run.arguments
    for name, tokens, passed in itertools.product(asked.models, asked.tokens, asked.passes):
        head = MODELS[name]
        backward = passed == layer_runs.PASSES[1]
        made = loops(tokens, head, mesh, asked.methods, backward)
        for method, (program, given) in made.items():
            memory = program(1).lower(jax.eval_shape(given)).compile().memory_analysis()
            print(
                f"{name}, {passed}, {method}: {memory.temp_size_in_bytes / 2**20:.0f} MiB beside operands", flush=True
            )
        flops = 2.0 * tokens * head.features * head.vocabulary * (4 if backward else 1)
        us = experts.measure(made, asked.rounds, run.turns(flops))
        if us:
            run.add(f"{tokens}x{head.features}x{head.vocabulary}", f"{name}, {passed}", us)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
