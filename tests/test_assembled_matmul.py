"""`matmul` in all its forms, tiles and epilogues, and ragged collectives, assembled for sm_90a: nothing spills."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests import assembly
from tests.assembly import Case

pytestmark = pytest.mark.skipif(
    assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason())
)  # fmt: skip
EPILOGUES = {"bias": ("bias",), "c": ("c",), "all": ("bias", "c", "scale"), "gelu": ("bias",), "relu": ()}
ACTIVATIONS = {"all": jnp.tanh, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def product_case(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """A product for `tests.assembly`; `case.config` holds fields of `Config` and what is popped here."""
    options = dict(case.config)
    left, right = options.pop("left", False), options.pop("right", False)
    out, batch = options.pop("out", None), options.pop("batch", ())
    epilogue = options.pop("epilogue", None)
    config = overlap.Config(**options) if options else None
    m, n, k = case.shape
    structs = [
        assembly.struct(mesh, (*batch, *((k, m) if left else (m, k))), case.dtype),
        assembly.struct(mesh, (*batch, *((n, k) if right else (k, n))), case.dtype),
    ]
    names = EPILOGUES.get(epilogue, ())
    shapes = {"bias": (n,), "c": (*batch, m, n), "scale": (m, 1)}
    structs += [assembly.struct(mesh, shapes[name], case.dtype if name == "c" else "f32") for name in names]

    def call(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        return overlap.matmul(
            lhs, rhs, transpose_lhs=left, transpose_rhs=right, preferred_element_type=out, config=config,
            activation=ACTIVATIONS.get(epilogue), implementation="fused", **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), tuple(structs)


def check(shape: tuple[int, int, int], dtype: str = "f16", **options: Any) -> None:
    case = Case("tests.test_assembled_matmul:product_case", 1, shape, dtype, config=options)
    report = next(r for r in assembly.assemble_case(case) if r.name == "overlap_matmul")
    assert report.architecture == "sm_90a"
    assert report.spills == 0 and report.stack_frame_bytes == 0
    assert report.warnings == ()
    assert report.registers * math.prod(report.threads) <= 65536
    assert report.shared_memory_bytes is not None
    assert report.shared_memory_bytes <= assembly.TARGETS["h200"].shared_memory_per_block_optin


FORMS = [dict(left=left, right=right) for left in (False, True) for right in (False, True)]
BIG = (1024, 1536, 2048)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form):
    check(BIG, "bf16", **form)


TILES = [
    dict(tile_m=64, tile_n=256),
    dict(tile_m=64, tile_n=128, stages=8, split_k=2),
    dict(tile_m=256, tile_n=128),
    dict(tile_m=256, tile_n=64, stages=3),
    dict(tile_n=192),
    dict(tile_n=128, stages=6, epilogue_slots=2),
    dict(tile_n=64, stages=8),
]


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=["nn", "tt"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, form):
    check(BIG, **tile, **form)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue):
    check(BIG, epilogue=epilogue)


RAGGED = [
    ((4097, 4104, 4104), "f16", {}),
    ((4104, 4104, 4097), "bf16", dict(left=True)),
    ((4097, 4104, 4104), "f16", dict(right=True, batch=(3,))),
    ((1, 8, 8), "f16", {}),
    ((100, 264, 144), "float8_e4m3fn", dict(right=True, out="bfloat16", epilogue="all")),
    ((16, 8192, 8192), "bf16", dict(out="float32")),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), RAGGED, ids=str)
def test_ragged(shape, dtype, options):
    check(shape, dtype, **options)


def test_a_ragged_all_gather():
    (report,) = assembly.assemble_case(Case("all_gather_lhs_matmul", 3, (1000, 3000, 4104), "bf16"))
    assert report.spills == 0 and report.stack_frame_bytes == 0 and report.warnings == ()
