"""Makes the methods of the tables of products: the fused operation, XLA, the product alone, JAX's example."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import overlap
from benchmarks.harness import Method
from lessons import blackwell, hopper
from overlap.choice.problem import Problem
from overlap.cli.arguments import config_fields
from overlap.kernels.target import current_target
from overlap.tuning.operations import AXIS, call_operation, product, unfused

LADDERS = {"hopper": hopper.RUNGS, "blackwell": blackwell.RUNGS}


@dataclasses.dataclass(frozen=True)
class Variant:
    """The fused operation with some fields of its configuration set, such as `fused:stages=3,tile_n=128`."""

    name: str
    fields: dict[str, Any]


def variant(text: str) -> Variant:
    """A type of argparse that reads `fused:FIELD=VALUE,...`."""
    name, _, fields = text.partition(":")
    if name != "fused":
        raise argparse.ArgumentTypeError(f"must begin with `fused`, got {text!r}: write fused:tile_n=128,stages=3")
    return Variant(text, config_fields(fields) if fields else {})


def make(
    problem: Problem, names: Sequence[str], variants: Sequence[Variant], architecture: str | None = None
) -> list[Method]:
    """Makes the methods of a problem.

    Args:
      problem: what is measured.
      names: the names of the methods; "ladder" stands for all rungs of the ladder.
      variants: the configurations of "fused"; none: the library's choice.
      architecture: a key of `LADDERS`; None: the device's architecture.

    Raises:
      ValueError: there is no method of such a name.
    """
    if any(name not in _MAKERS for name in names):
        architecture = architecture or ("blackwell" if current_target().is_blackwell else "hopper")
        rungs = {rung.name: Method(rung.name, rung.matmul) for rung in LADDERS[architecture]}
        if jax.default_backend() == "cpu":
            overlap.emulation.enable()  # Without a GPU, rungs run only in the emulator.
    else:
        rungs = {}
    methods: list[Method] = []
    for name in names:
        if name == "fused":
            methods += [_fused(problem, variant) for variant in variants or [Variant("fused", {})]]
        elif name in _MAKERS:
            methods += _MAKERS[name](problem)
        elif name == "ladder":
            methods += rungs.values()
        elif name in rungs:
            methods.append(rungs[name])
        else:
            known = ", ".join((*_MAKERS, "ladder", *rungs))
            raise ValueError(f"`--methods` must name some of {known}; got {name!r}")
    return methods


def _fused(problem: Problem, variant: Variant) -> Method:
    fields = dict(variant.fields)
    transport = fields.pop("transport", None)  # `fused:transport=ring`

    def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        config = overlap.Config(**fields) if fields else None
        return call_operation(problem, lhs, rhs, config, "fused", **({"transport": transport} if transport else {}))

    return Method(variant.name, call)


def _roof(problem: Problem) -> list[Method]:
    return [Method("roof", functools.partial(product, problem), gathered=True)]


def _own_matmul(problem: Problem) -> list[Method]:
    return [Method("own_matmul", functools.partial(product, problem, implementation="fused"), gathered=True)]


def _fused_bf16(problem: Problem) -> list[Method]:
    method = _fused(problem, Variant("fused_bf16", {}))
    return [dataclasses.replace(method, dtype=jnp.bfloat16)] if problem.itemsize == 1 else []


def _jax_example(problem: Problem) -> list[Method]:
    """JAX's example kernel, in three configurations with CTA tiles of 128 x 256 and 256 x 128."""
    if problem.layout != "nn" or problem.itemsize == 1 or problem.op not in ("matmul", "all_gather_lhs_matmul"):
        return []
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    def call(config: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if problem.op == "matmul":
            return hopper_matmul_mgpu.matmul(lhs, rhs, None, config)
        return collective_matmul_mgpu.all_gather_lhs_matmul(lhs, rhs, AXIS, config=config, dtype=lhs.dtype)

    dimension = hopper_matmul_mgpu.MatmulDimension
    m, n = dimension["M"], dimension["N"]
    methods = []
    for split, minor in ((n, m), (m, n), (n, n)):
        config = hopper_matmul_mgpu.TuningConfig(
            tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, wg_dimension=split, grid_minor_dim=minor,
            grid_tile_width=8,
        )  # fmt: skip
        name = f"jax_example split {split.name} minor {minor.name}"
        methods.append(Method(name, functools.partial(call, config)))
    return methods


_MAKERS: dict[str, Callable[[Problem], list[Method]]] = {
    "fused": lambda problem: [_fused(problem, Variant("fused", {}))],
    "xla": lambda problem: [Method("xla", functools.partial(unfused, problem), gathered=not problem.communicates)],
    "roof": _roof,
    "own_matmul": _own_matmul,
    "fused_bf16": _fused_bf16,
    "jax_example": _jax_example,
}
