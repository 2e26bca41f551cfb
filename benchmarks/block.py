r"""A block as a user writes it: the MLP of a transformer, forward, and forward with backward, against the same by XLA.

    python -m benchmarks.block --out benchmarks/experiments/DATE-QUESTION
    python -m benchmarks.block --tokens 8192 --hidden 8192 --inner 28672

Gate and up share one gather of the tokens' rows, and the second matrix is followed by a reduce-scatter. "Chosen" is
`implementation=None`, "XLA" the same in plain JAX, whose backward pass is XLA's too. Each is a loop inside one program,
in which every turn depends on the one before; medians over rounds in random order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import command, current, environment, provenance
from overlap.choice.tables import replace
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, new_folder, whole_number
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of
from overlap.tuning.timing import elapsed_s, marginal_s

ROWS, COLUMNS = P(AXIS, None), P(None, AXIS)
SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)  # Of the tokens, and of the weights of gate, up and down.
Method = Literal["fused", "plain"] | None
METHODS: dict[str, Method] = {"fused": "fused", "chosen": None, "XLA": "plain"}
_DRY_TURNS = 1
_US_PER_LOOP, _FLOPS_PER_US = 40e3, 650e6


def mlp(implementation: Method, x: Any, gate: Any, up: Any, down: Any) -> jax.Array:
    """The block on one device's shards, inside `jax.shard_map`."""
    if implementation == "plain":
        rows = lax.all_gather(x, AXIS, tiled=True)
        return lax.psum_scatter((jax.nn.silu(rows @ gate) * (rows @ up)) @ down, AXIS, tiled=True)
    # The gathered rows are kept for the backward pass, as plain JAX keeps them.
    (gated, upped), _ = overlap.all_gather_lhs_matmul(
        x, [gate, up], AXIS, return_gathered=True, implementation=implementation
    )
    return overlap.matmul_reduce_scatter(jax.nn.silu(gated) * upped, down, AXIS, implementation=implementation)


def _normal(values: jax.Array, dtype: Any) -> jax.Array:
    wide = values.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide) + 1e-12)).astype(dtype)


def forward(implementation: Method) -> Callable[..., Any]:
    """One turn of the loop: from (tokens, weights) to the next."""
    return lambda x, weights: (_normal(mlp(implementation, x, *weights), x.dtype), weights)


def with_backward(implementation: Method) -> Callable[..., Any]:
    """The same with all gradients; those of the weights are added to the weights, so that none can be left out."""

    def turn(x: Any, weights: Any) -> Any:
        _, backward = jax.vjp(lambda *operands: mlp(implementation, *operands), x, *weights)
        d_x, *d_weights = backward(x)
        return _normal(d_x, x.dtype), [w + (1e-6 * d).astype(w.dtype) for w, d in zip(weights, d_weights, strict=True)]

    return turn


def program(turn: Callable[..., Any], mesh: Mesh, turns: int) -> Any:
    """A jitted loop of so many turns."""

    def run(x: Any, *weights: Any) -> Any:
        x, weights = lax.fori_loop(0, turns, lambda _, state: turn(*state), (x, list(weights)))
        return x, *weights

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SPECS, out_specs=SPECS, check_vma=False))


def operands(mesh: Mesh, tokens: int, hidden: int, inner: int) -> list[jax.Array]:
    """Normal tokens, and weights that keep their size."""
    shapes = ((tokens, hidden), (hidden, inner), (hidden, inner), (inner, hidden))
    scales = (1.0, hidden**-0.5, hidden**-0.5, inner**-0.5)

    def draw(seed: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shapes[seed], jnp.float32) * scales[seed]).astype(jnp.bfloat16)

    return [jax.jit(draw, static_argnums=0, out_shardings=NamedSharding(mesh, s))(i) for i, s in enumerate(SPECS)]


def measure(
    mesh: Mesh, tokens: int, hidden: int, inner: int, pass_of: Any, rounds: int, turns: int | None = None
) -> dict[str, float]:
    """Microseconds of one turn by each method; AssertionError if one of them computes something else."""
    flops = 6.0 * tokens * hidden * inner / mesh.size * (1 if pass_of is forward else 3)
    turns = turns or max(2, min(40, int(_US_PER_LOOP / (flops / _FLOPS_PER_US))))
    given = operands(mesh, tokens, hidden, inner)
    once = {name: program(pass_of(how), mesh, 1)(*given)[0] for name, how in METHODS.items()}
    for name, result in once.items():
        distance = jnp.linalg.norm((result - once["XLA"]).astype(jnp.float32)) / jnp.linalg.norm(result)
        assert distance < 2e-2, f"{name} differs from XLA by {float(distance):.1e}"
    loops = {name: program(pass_of(how), mesh, turns).lower(*given).compile() for name, how in METHODS.items()}
    outs: list[Any] = [None]

    def launch(name: str) -> None:
        outs[0] = loops[name](*given)

    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(list(loops)):
            seconds = lambda count, name=name: elapsed_s(lambda: launch(name), lambda: outs, count)  # noqa: E731
            times[name].append(1e6 * marginal_s(seconds, 1) / turns)
    return {name: statistics.median(values) for name, values in times.items()}


def _tokens(text: str) -> list[int]:
    return [whole_number(1)(each) for each in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=_tokens, default="8192,2048", help="of all devices, separated by commas")
    parser.add_argument("--hidden", type=whole_number(1), default=8192)
    parser.add_argument("--inner", type=whole_number(1), default=28672)
    parser.add_argument("--devices", type=whole_number(1), help="default: all")
    parser.add_argument("--rounds", type=whole_number(1), default=7)
    parser.add_argument("--commit", help="this tree's commit, where there is no .git")
    parser.add_argument("--out", type=new_folder, help="a folder for block-DEVICE-COUNT-LAYOUT.md")
    parser.add_argument("--dry-run", action="store_true", help="2 CPU devices and a tiny block, to test the harness")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        arguments.tokens, arguments.hidden, arguments.inner, arguments.rounds = [64], 64, 64, 1
        code = {"commit": "none: a dry run measures nothing"}
    else:
        command.need_gpus()
        try:
            code = provenance.facts(arguments.commit)
        except provenance.Refused as refused:
            print(f"block: {refused}", file=sys.stderr)
            return 2
    overlap.initialize()
    processes, devices = jax.process_count(), arguments.devices or jax.device_count()
    if devices > jax.device_count():
        raise WrongArguments(f"block: `--devices` must be at most {jax.device_count()} here, got {devices}")
    for name in ("hidden", "inner", "tokens"):
        given = getattr(arguments, name)
        if any(size % devices for size in (given if name == "tokens" else [given])):
            raise WrongArguments(f"block: `--{name}` must be a multiple of the {devices} devices, got {given}")
    mesh, leads = mesh_of(jax.devices()[:devices]), jax.process_index() == 0
    facts = environment.describe("one process" if processes == 1 else f"{processes} processes", devices, code)
    size = f"{arguments.hidden} by {arguments.inner}"
    lines = [f"# An MLP of {size}, {devices} GPUs", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    columns = ("tokens", "pass", "fused, µs", "chosen, µs", "XLA, µs", "XLA / fused", "XLA / chosen")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for tokens in arguments.tokens:
        for name, pass_of in (("forward", forward), ("forward and backward", with_backward)):
            sizes = tokens, arguments.hidden, arguments.inner
            us = measure(mesh, *sizes, pass_of, arguments.rounds, _DRY_TURNS if arguments.dry_run else None)
            ratios = [us["XLA"] / us[method] for method in ("fused", "chosen")]
            lines.append(
                f"| {tokens} | {name} | {us['fused']:.0f} | {us['chosen']:.0f} | {us['XLA']:.0f} | {ratios[0]:.3f} | "
                f"{ratios[1]:.3f} |"
            )
            if leads:
                print(lines[-1], flush=True)
    if arguments.out and leads:
        arguments.out.mkdir(parents=True, exist_ok=True)
        file = current.name_of("block", mesh.devices.flat[0].device_kind, devices, processes)
        replace(arguments.out / f"{file}.md", "\n".join(lines) + "\n")
        print(f"wrote {arguments.out / file}.md", flush=True)
    if leads and not arguments.out:
        print("nothing was written, for want of `--out`")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
