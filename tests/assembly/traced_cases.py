"""Kernels with marks (`overlap.primitives.marks`), and the exchange of clocks: cases for `tests.assembly.assembly`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.assembly import assembly
from tests.assembly.assembly import Case

if TYPE_CHECKING:
    import jax


def traced(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a call of `case.config["of"]` with marks, or without marks if `case.config["off"]`.

    The other entries of `case.config` are fields of `Config`.
    """
    import functools

    import overlap
    from overlap.choice.problem import Problem
    from overlap.tuning import trace
    from overlap.tuning.operations import call_operation, shapes, specs
    from overlap.tuning.programs import call_program

    options = dict(case.config)
    op, off = options.pop("of"), options.pop("off", False)
    config = overlap.Config(**options) if options else None
    problem = Problem(op, *case.shape, "bfloat16", "bfloat16", devices=mesh.size)
    call = functools.partial(lambda lhs, rhs: call_operation(problem, lhs, rhs, config, "fused"))
    program = call_program(problem, call, mesh) if off else trace.program(problem, call, mesh, 64)[0]
    structs = []
    for shape, spec in zip(shapes(problem), specs(problem)[:2], strict=True):
        whole = tuple(size * (mesh.size if axis else 1) for size, axis in zip(shape, spec, strict=True))
        structs.append(assembly.struct(mesh, whole, case.dtype, spec))
    return program, tuple(structs)


def clocks(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the kernel that compares the devices' clocks."""
    import jax.numpy as jnp

    from overlap.tuning import clocks

    run = clocks.program(mesh)
    return (lambda x: (run(), x)), (assembly.struct(mesh, (8,), jnp.float32),)


def assembled_ahead(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a product whose kernel is assembled as soon as it is lowered, here before XLA compiles the program."""
    import jax.numpy as jnp

    import overlap
    from overlap.kernels import ahead

    given = ahead._device, ahead._start

    def start() -> None:
        ahead._device, ahead._start = given
        with assembly._captured_stdout():
            ahead._work()

    ahead._device = lambda context: mesh.devices.flat[0]
    ahead._start = start
    lhs, rhs = (assembly.struct(mesh, shape, case.dtype) for shape in (case.shape[::2], case.shape[:0:-1]))
    return (lambda x, y: overlap.matmul(jnp.tanh(x), y, implementation="fused")), (lhs, rhs)
