"""A mesh axis may have any name: it never equals a kernel's own axis."""

import re

import jax
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.sharding import PartitionSpec as P

from lessons.hopper import RUNGS
from overlap.choice import dispatch
from tests.ops.contract import FORMS, H200, JOINED, struct
from tests.oracle import make_mesh

# Names that our kernels, the ladder's lessons or their readers would give to a kernel's own axes.
NAMES, LESSONS_NAMES = ("cluster", "warpgroup", "rank"), ("cta", "m", "n")
CALLS = {
    "joined": FORMS["joined"].but(config=JOINED.replace(stream_k=2)),
    "scatter m": FORMS["scatter m"],
}
LESSONS = {rung.name: rung for rung in RUNGS}


@pytest.fixture
def modules(monkeypatch):
    """The lowered kernels, as Mosaic GPU's text."""
    texts, lower = [], lowering.lower_unpipelined_jaxpr_to_module

    def keep(*args, **kwargs):
        result = lower(*args, **kwargs)
        texts.append(re.sub(r'dump_basename = "[^"]*"', "", str(result.module)))  # Counts the kernels.
        return result

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", keep)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    return texts


@pytest.mark.parametrize("name", [*CALLS, list(LESSONS)[-1]])
def test_the_compiler_makes_the_same_kernel_whatever_the_axes_are_called(name, modules):
    """test_numbers.py runs every form emulated on axes with such names."""
    for names in (("x", "y", "z"), LESSONS_NAMES if name in LESSONS else NAMES):
        mesh = make_mesh(**dict.fromkeys(names, 2))
        if name in LESSONS:
            rung, operand = LESSONS[name], struct(256, 256)
            call = jax.shard_map(rung.matmul, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            jax.jit(call).trace(operand, operand).lower(lowering_platforms=("cuda",))
            continue
        call = CALLS[name].but(axis=names[0], m=64, n=128)
        types = call.types(2)
        call.program(mesh, types).trace(types).lower(lowering_platforms=("cuda",))
    assert "block_id" in modules[0]
    assert set(modules) == {modules[0]}
