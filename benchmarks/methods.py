"""Makes the methods of each table: the fused operation with several configurations, XLA, the roof, JAX's example."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import overlap
from benchmarks.harness import Method
from overlap.choice.problem import Problem
from overlap.kernels import blackwell_ladder, ladder
from overlap.kernels.target import current_target
from overlap.tuning.operations import AXIS, product, shapes, unfused

FUSED_BF16 = "fused_bf16"
LADDERS = {"hopper": ladder.RUNGS, "blackwell": blackwell_ladder.RUNGS}


@dataclasses.dataclass(frozen=True)
class Variant:
    """The fused operation with some fields of its configuration set, such as `fused:stages=3,tile_n=128`."""

    name: str
    config: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Reads `NAME:FIELD=VALUE,...`. Integers, True, False and None are read as such, all other values as text."""
        name, _, fields = text.partition(":")
        if name != "fused":
            raise ValueError(f"a variant must begin with `fused`, got {text!r}: write fused:tile_n=128,stages=3")
        pairs = [field.partition("=") for field in fields.split(",") if field]
        if any(not separator for _, separator, _ in pairs):
            raise ValueError(f"a variant's fields must be FIELD=VALUE, got {text!r}")
        return cls(text, {key.strip(): _value(value.strip()) for key, _, value in pairs})


def _value(text: str) -> int | str | bool | None:
    words = {"True": True, "False": False, "None": None}
    return int(text) if text.lstrip("-").isdigit() else words.get(text, text)


def all_gather_methods(
    problem: Problem, names: Sequence[str], variants: Sequence[Variant], num_examples: int
) -> list[Method]:
    """Makes the methods for `all_gather_lhs_matmul`.

    Args:
      problem: what is measured.
      names: the names of the methods to make.
      variants: the configurations of "fused"; none: the library's choice.
      num_examples: how many configurations are tried for "jax_example".
    """
    form = {"transpose_rhs": problem.transpose_rhs, "preferred_element_type": problem.out_dtype}

    def fused(variant: Variant) -> Method:
        def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            fields = dict(variant.config)
            transport = fields.pop("transport", None)  # `fused:transport=ring`
            return overlap.all_gather_lhs_matmul(
                lhs, rhs, AXIS, config=_config(fields), implementation="fused", transport=transport, **form
            )

        return Method(variant.name, call)

    makers: dict[str, Callable[[], Method]] = {
        "xla": lambda: Method("xla", functools.partial(unfused, problem)),
        "roof": lambda: Method("roof", functools.partial(product, problem), gathered=True),
        # The same mainloop on gathered operands: the difference between it and `fused` is communication.
        "own_matmul": lambda: Method(
            "own_matmul", functools.partial(overlap.matmul, implementation="fused", **form), gathered=True
        ),
        "jax_example": lambda: _all_gather_example(problem, num_examples),
    }
    return _select(names, variants, fused, makers)


def all_gather_rhs_methods(
    problem: Problem, names: Sequence[str], variants: Sequence[Variant], num_examples: int
) -> list[Method]:
    """Makes the methods for `all_gather_rhs_matmul`. The arguments are described in `all_gather_methods`.

    JAX has no example kernel for this operation.
    """
    del num_examples

    def fused(variant: Variant) -> Method:
        def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return overlap.all_gather_rhs_matmul(
                lhs,
                rhs,
                AXIS,
                dimension=0 if problem.gathered == "k" else 1,
                config=_config(variant.config),
                implementation="fused",
                transpose_lhs=problem.transpose_lhs,
            )

        return Method(variant.name, call)

    makers: dict[str, Callable[[], Method]] = {
        "xla": lambda: Method("xla", functools.partial(unfused, problem)),
        "roof": lambda: Method("roof", functools.partial(product, problem), gathered=True),
    }
    return _select(names, variants, fused, makers)


def summed_methods(
    problem: Problem, names: Sequence[str], variants: Sequence[Variant], num_examples: int
) -> list[Method]:
    """Makes the methods for products that are summed over the devices.

    "roof" and "own_matmul" are one device's products, without the sum. The arguments are described in
    `all_gather_methods`.
    """
    del num_examples
    form = {
        "transpose_lhs": problem.transpose_lhs,
        "transpose_rhs": problem.transpose_rhs,
        "preferred_element_type": problem.out_dtype,
    }

    def fused(variant: Variant) -> Method:
        def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            more = {**form, "config": _config(variant.config), "implementation": "fused"}
            if problem.replicates:
                return overlap.matmul_all_reduce(lhs, rhs, AXIS, **more)
            dimension = 0 if problem.scattered == "m" else 1
            return overlap.matmul_reduce_scatter(lhs, rhs, AXIS, dimension=dimension, **more)

        return Method(variant.name, call)

    makers: dict[str, Callable[[], Method]] = {
        "xla": lambda: Method("xla", functools.partial(unfused, problem)),
        "roof": lambda: Method("roof", functools.partial(product, problem), gathered=True),
        "own_matmul": lambda: Method(
            "own_matmul", functools.partial(overlap.matmul, implementation="fused", **form), gathered=True
        ),
    }
    return _select(names, variants, fused, makers)


def matmul_methods(
    problem: Problem, names: Sequence[str], variants: Sequence[Variant], num_examples: int
) -> list[Method]:
    """Makes the methods for `matmul` on one GPU, where "xla" is the roof as well.

    "fused_bf16" is the library's kernel on the same values in bf16. This method exists for f8 operands only, for a
    comparison of f8 with bf16. The arguments are described in `all_gather_methods`.
    """

    def keywords(config: dict[str, Any]) -> dict[str, Any]:
        return {
            "transpose_lhs": problem.transpose_lhs,
            "transpose_rhs": problem.transpose_rhs,
            "preferred_element_type": problem.out_dtype,
            "config": _config(config),
            "implementation": "fused",
        }

    def matmul(config: dict[str, Any], lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return overlap.matmul(lhs, rhs, **keywords(config))

    def fused(variant: Variant, name: str = "", dtype: DTypeLike | None = None) -> Method:
        def check() -> None:
            operands = (jax.ShapeDtypeStruct(shape, dtype or problem.dtype) for shape in shapes(problem))
            overlap.explain(overlap.matmul, *operands, **keywords({}))

        call = functools.partial(matmul, variant.config)
        method = Method(name or variant.name, call, dtype=dtype)
        # Without a config, `check` may say NOT SERVED. A given config that does not fit is an error.
        return method if variant.config else dataclasses.replace(method, check=check)

    makers: dict[str, Callable[[], Method]] = {
        "fused_bf16": lambda: fused(Variant("fused", {}), FUSED_BF16, jnp.bfloat16),
        "xla": lambda: Method("xla", functools.partial(product, problem), gathered=True),
        "jax_example": lambda: _matmul_example(problem, num_examples),
    }
    return _select([name for name in names if name != FUSED_BF16 or problem.itemsize == 1], variants, fused, makers)


def ladder_methods(
    problem: Problem,
    names: Sequence[str],
    variants: Sequence[Variant],
    num_examples: int,
    *,
    architecture: str | None = None,
) -> list[Method]:
    """Makes the methods in `names`, from the rungs (kernels) of one architecture's ladder and from `matmul_methods`.

    "ladder" in `names` selects all rungs. `architecture` is a key of `LADDERS`; None means the device's architecture.
    """
    architecture = architecture or ("blackwell" if current_target().is_blackwell else "hopper")
    rungs = {rung.name: Method(rung.name, rung.matmul) for rung in LADDERS[architecture]}
    if jax.default_backend() == "cpu":
        overlap.emulation.enable()  # Without a GPU, rungs run only in the emulator.
    methods = []
    for name in names:
        if name == "ladder":
            methods += rungs.values()
        else:
            methods += [rungs[name]] if name in rungs else matmul_methods(problem, [name], variants, num_examples)
    return methods


def _select(
    names: Sequence[str],
    variants: Sequence[Variant],
    fused: Callable[[Variant], Method],
    makers: dict[str, Callable[[], Method]],
) -> list[Method]:
    methods = []
    for name in names:
        if name == "fused":
            methods += [fused(variant) for variant in variants or [Variant("fused", {})]]
        elif name in makers:
            methods.append(makers[name]())
        else:
            raise ValueError(f"`--methods` must name some of fused, {', '.join(makers)}; got {name!r}")
    return methods


def _config(fields: dict[str, Any]) -> overlap.Config | None:
    return overlap.Config(**fields) if fields else None


# --- JAX's example kernels --------------------------------------------------------------------------------------------


def _example_configs(limit: int) -> list[tuple[str, Any]]:
    """Returns at most `limit` configurations of JAX's example, each with a label. The probably fastest come first.

    The first six have CTA tiles of 128 x 256 and 256 x 128 in several orders. The rest of the 48 configurations that
    the example searches itself follow. Configurations that do not fit on the GPU fail when they run.
    """
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

    along = hopper_matmul_mgpu.MatmulDimension
    grid = [
        # (tile_m, tile_n, stages, warpgroups split along, fastest grid dimension, grid tile width)
        (128, 128, 4, along.N, along.M, 8),
        (128, 128, 4, along.M, along.N, 8),
        (128, 128, 4, along.N, along.N, 8),
        (128, 128, 4, along.M, along.M, 8),
        (128, 128, 4, along.N, along.M, 4),
        (64, 256, 4, along.M, along.M, 8),
    ]
    axes = (along.M, along.N)
    own = itertools.product((128, 256), (64, 128), (4,), axes, axes, (4, 8, 16))
    grid += [config for config in own if config not in grid]
    configs = []
    for tile_m, tile_n, stages, split, minor, width in grid[: max(limit, 1)]:
        config = hopper_matmul_mgpu.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=64,
            max_concurrent_steps=stages,
            wg_dimension=split,
            grid_minor_dim=minor,
            grid_tile_width=width,
        )
        configs.append((f"{tile_m}x{tile_n}x64 stages {stages} split {split.name} minor {minor.name}/{width}", config))
    return configs


def _all_gather_example(problem: Problem, limit: int) -> Method:
    def call(config: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

        return collective_matmul_mgpu.all_gather_lhs_matmul(lhs, rhs, AXIS, config=config, dtype=lhs.dtype)

    return _example(problem, call, limit)


def _matmul_example(problem: Problem, limit: int) -> Method:
    def call(config: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

        return hopper_matmul_mgpu.matmul(lhs, rhs, None, config)

    return _example(problem, call, limit)


def _example(problem: Problem, call: Callable[..., jax.Array], limit: int) -> Method:
    def check() -> None:
        if problem.layout != "nn" or problem.itemsize == 1:
            raise NotImplementedError(f"JAX's examples multiply 16-bit operands in layout nn, got {problem}")

    try:
        configs = _example_configs(limit)
    except Exception as error:
        # The example cannot be imported here. So return a method that fails: the row in the table then has the error.
        failure = error

        def fail(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            raise failure

        return Method("jax_example", fail, check=check)
    candidates = tuple((label, functools.partial(call, config)) for label, config in configs)
    return Method("jax_example", candidates[0][1], check=check, candidates=candidates)
