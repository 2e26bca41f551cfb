"""Helpers that call `all_gather_lhs_matmul` in all its forms: they draw operands and compare with the exact result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from tests import oracle


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of one call; sizes are per shard.

    `scales` names the scales that are given: "scalar", "rows", "columns". `container` is list or tuple, or None for a
    single right operand.
    """

    m: int
    widths: tuple[int, ...]
    k: int
    batch: tuple[int, ...] = ()
    dtype: Any = jnp.float16
    rhs_dtype: Any = None
    out_dtype: Any = None
    transpose_rhs: bool = False
    gathered: bool = False
    scales: tuple[str, ...] = ()
    container: Any = list

    def __str__(self) -> str:
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default or f.name == "m"]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields).replace("<class ", "").replace(">", "")


def specs(form: Form) -> Any:
    """Returns the partition specs of the left operand, the right operands, the row scales and the column scales."""
    leading = (None,) * len(form.batch)
    side = P("x", None) if form.transpose_rhs else P(None, "x")
    rows = P(*leading, "x", None)
    return P(*leading, "x", None), [side] * len(form.widths), rows, [P("x")] * len(form.widths)


def operands(form: Form, devices: int, seed: int = 0, draw: Any = None) -> tuple[Any, ...]:
    """Draws NumPy operands: by default small integers (products are exact in f32) and scales that are powers of two."""
    rng = np.random.default_rng(seed)
    draw = draw or (lambda rng, *shape: rng.integers(-3, 4, shape))
    lhs = draw(rng, *form.batch, devices * form.m, form.k).astype(form.dtype)
    shapes = [(devices * n, form.k) if form.transpose_rhs else (form.k, devices * n) for n in form.widths]
    sides = [draw(rng, *shape).astype(form.rhs_dtype or form.dtype) for shape in shapes]
    power = lambda *shape: 2.0 ** rng.integers(-2, 2, shape).astype(np.float32)  # noqa: E731
    return lhs, sides, power(*form.batch, devices * form.m, 1), [power(devices * n) for n in form.widths]


def expected(form: Form, lhs: Any, sides: Any, rows: Any, columns: Any) -> list[Any]:
    """Computes the exact results in f32 with NumPy."""
    results = []
    for side, column in zip(sides, columns, strict=True):
        matrix = np.asarray(side, np.float32)
        out = np.asarray(lhs, np.float32) @ (matrix.T if form.transpose_rhs else matrix)
        out = out * (0.5 if "scalar" in form.scales else 1.0)
        out = out * rows if "rows" in form.scales else out
        results.append(out * column if "columns" in form.scales else out)
    return results


def call(form: Form, **kwargs: Any) -> Any:
    """Returns a function from per-shard operands (as `operands` orders them) to (results, [gathered] or [])."""

    def body(lhs: Any, sides: Any, rows: Any, columns: Any) -> Any:
        scalar = 0.5 if "scalar" in form.scales else None
        # The scalar takes the place of whichever scale is not given, or is multiplied into the column scales.
        lhs_scale, rhs_scale = (rows, scalar) if "rows" in form.scales else (scalar, None)
        if "columns" in form.scales:
            each = [column if rhs_scale is None else column * rhs_scale for column in columns]
            rhs_scale = each[0] if form.container is None else form.container(each)
        rhs = sides[0] if form.container is None else form.container(sides)
        result = overlap.all_gather_lhs_matmul(
            lhs, rhs, "x", lhs_scale=lhs_scale, rhs_scale=rhs_scale, transpose_rhs=form.transpose_rhs,
            return_gathered=form.gathered, preferred_element_type=form.out_dtype, **kwargs,
        )  # fmt: skip
        outs, gathered = result if form.gathered else (result, None)
        assert form.container is None or type(outs) is form.container
        return [outs] if form.container is None else list(outs), [] if gathered is None else [gathered[None]]

    return body


def on_mesh(form: Form, mesh: Any, body: Any) -> Any:
    """Returns `body` (from `call`) under jit; the gathered operand is returned once for each device."""
    out = P(*(None,) * (len(form.batch) + 1), "x")
    return oracle.on_mesh(mesh, body, specs(form), ([out] * len(form.widths), [P("x")] if form.gathered else []))


def put(form: Form, mesh: Any, arrays: Any) -> Any:
    """Puts the operands on the mesh."""
    return jax.tree.map(
        lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index]),
        tuple(arrays), tuple(specs(form)), is_leaf=lambda x: isinstance(x, (np.ndarray, P)),
    )  # fmt: skip


def assert_exact(form: Form, arrays: Any, results: Any) -> None:
    """Compares every bit of the results, and of the gathered operand on every device."""
    outs, gathered = results
    for out, exact in zip(outs, expected(form, *arrays), strict=True):
        for shard in out.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data, np.float32), exact.astype(out.dtype).astype(np.float32)[shard.index]
            )
    assert len(gathered) == form.gathered
    for copies in gathered:
        for shard in copies.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data[0], np.float32), np.asarray(arrays[0], np.float32))


def assembled(case: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function and arguments of a case for `tests.assembly.assembly`.

    `case.shape` is (m_shard, n, k), and `case.config` has fields of `Config` and of `Form`.

    Tuples are given as text: widths=4096+1024+1024, batch=2x3, scales=rows+columns. `transport=ring` is allowed too.
    """
    from tests.assembly import assembly

    options = dict(case.config)
    m, n, k = case.shape
    widths = tuple(int(width) for width in str(options.pop("widths", n)).split("+"))
    batch = tuple(int(size) for size in str(options.pop("batch", "")).split("x") if size)
    scales = tuple(name for name in str(options.pop("scales", "")).split("+") if name)
    fields = {f.name for f in dataclasses.fields(Form)} & set(options)
    given = {name: options.pop(name) for name in fields}
    transport = options.pop("transport", None)
    form = Form(m, widths, k, batch, scales=scales, **given)
    devices, (lhs, sides, rows, columns) = mesh.shape["x"], specs(form)
    right = [(devices * n, k) if form.transpose_rhs else (k, devices * n) for n in widths]
    structs = (
        assembly.struct(mesh, (*batch, devices * m, k), case.dtype, lhs),
        [assembly.struct(mesh, shape, case.dtype, spec) for shape, spec in zip(right, sides, strict=True)],
        assembly.struct(mesh, (*batch, devices * m, 1), "float32", rows),
        [assembly.struct(mesh, (devices * n,), "float32", spec) for n, spec in zip(widths, columns, strict=True)],
    )
    config = overlap.Config(**options) if options else None
    body = call(form, implementation="fused", config=config, transport=transport)
    return on_mesh(form, mesh, body), structs
