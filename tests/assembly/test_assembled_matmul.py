"""`matmul` assembled for sm_90a with each epilogue operand alone, and at ragged sizes: nothing spills."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.assembly import assembly
from tests.assembly.assembly import Case
from tests.assembly.assembly_products import EPILOGUES

pytestmark = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


def check(shape: tuple[int, int, int], dtype: str = "f16", **options: Any) -> None:
    (report,) = assembly.assemble_case(
        Case("tests.assembly.assembly_products:product", 1, shape, dtype, config=options)
    )
    assert report.architecture == "sm_90a"
    assert report.spills == 0 and report.stack_frame_bytes == 0
    assert report.remarks == ()
    assert report.registers * math.prod(report.threads) <= 65536
    assert report.shared_memory_bytes is not None
    assert report.shared_memory_bytes <= assembly.TARGETS["h200"].shared_memory_per_block_optin


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue):
    check((1024, 1536, 2048), epilogue=epilogue)


RAGGED = [
    ((4097, 4104, 4104), "f16", {}),
    ((4104, 4104, 4097), "bf16", dict(layout="tn")),
    ((4097, 4104, 4104), "f16", dict(layout="nt", batch=[3])),
    ((1, 8, 8), "f16", {}),
    ((100, 264, 144), "float8_e4m3fn", dict(layout="nt", out="bfloat16", epilogue="all")),
    ((16, 8192, 8192), "bf16", dict(out="float32")),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), RAGGED, ids=str)
def test_ragged(shape, dtype, options):
    check(shape, dtype, **options)


def test_a_ragged_all_gather():
    (report,) = assembly.assemble_case(Case("all_gather_lhs_matmul", 3, (1000, 3000, 4104), "bf16"))
    assert report.spills == 0 and report.stack_frame_bytes == 0 and report.remarks == ()
