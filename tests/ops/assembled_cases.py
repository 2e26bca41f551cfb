"""Any call as a case for `tests.assembly.assembly`, whose `shape` is (m, n, k) of one device, as in `Call`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

import overlap
from tests.assembly import assembly
from tests.ops.contract import RING, Call


def assembled(case: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function and arguments of a case.

    `case.config` has `call` (the name of the operation), fields of `Config`, and fields of `Call`. Tuples are given as
    text: widths=4096+1024, lead=2x3, extras=lhs_scale+bias. `gathered` and `ring` are allowed too.
    """
    options: dict[str, Any] = dict(case.config)
    m, n, k = case.shape
    fields: dict[str, Any] = {
        "widths": tuple(int(width) for width in str(options.pop("widths", "")).split("+") if width),
        "lead": tuple(int(size) for size in str(options.pop("lead", "")).split("x") if size),
        "extras": tuple(name for name in str(options.pop("extras", "")).split("+") if name),
        "keywords": (("return_gathered", True),) if options.pop("gathered", False) else (),
    }
    fields["keywords"] += RING if options.pop("ring", False) else ()
    op = options.pop("call")
    fields |= {f.name: options.pop(f.name) for f in dataclasses.fields(Call) if f.name in options}
    config = overlap.Config(**options) if options else None
    call = Call(op, m, n, k, config=config, dtype=assembly.dtype_of(case.dtype), **fields)
    types = call.types(mesh.shape["x"])
    specs = call.specs(types)
    structs = {
        name: jax.tree.map(lambda x, spec=specs[name]: assembly.struct(mesh, x.shape, x.dtype, spec), x)
        for name, x in types.items()
    }
    return call.program(mesh, types), (structs,)
