"""docs/upstream.md: one section for each module of `overlap/_compat/`; jax alone fails as the sections say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.docs.sources import tree_of

_MACHINERY = {"__init__", "patch"}


def lower(body, *scratch_types, **cluster):
    semantics = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    out_type = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    kernel = plgpu.kernel(body, out_type=out_type, scratch_types=scratch_types, compiler_params=semantics, **cluster)
    jax.jit(kernel).trace().lower(lowering_platforms=("cuda",))


def loop_in_a_warp():
    def body(_, done):
        @plgpu.warp_map
        def _(warp):
            end = lax.while_loop(lambda x: x < 100, lambda x: 3 * x + 1, warp)
            pl.when(end > 200)(lambda: plgpu.barrier_arrive(done))

    lower(body, plgpu.Barrier())


def product_of_tiles(lhs_rows, rhs_rows):
    def body(out_gmem, lhs_smem, rhs_smem, out_smem):
        def multiply(acc):
            plgpu.wgmma(acc, lhs_smem, rhs_smem)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64))).astype(jnp.float16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    def operand(rows):
        transforms = plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM((64, 64), jnp.float16, transforms=transforms)

    lower(body, operand(lhs_rows), operand(rhs_rows), plgpu.SMEM((64, 64), jnp.float16))


def trace_without_a_mesh():
    def per_device(slope):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            jax.make_jaxpr(lambda y: y * slope.sum())(jax.ShapeDtypeStruct((), jnp.float32))
        return slope

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    jax.make_jaxpr(jax.shard_map(per_device, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.ones(4))


REPRODUCERS = {
    "loops-in-warps": loop_in_a_warp,
    "square-tiles": lambda: product_of_tiles(64, 64),
    "unequal-tiles": lambda: product_of_tiles(8, 64),
    "varying-axes": trace_without_a_mesh,
}


def failures():
    found = {}
    for anchor, reproducer in REPRODUCERS.items():
        try:
            reproducer()
        except Exception as error:
            found[anchor] = str(error)
    return found


@pytest.fixture(scope="module")
def sections(repository):
    """The text below each heading, by the anchor that mkdocs makes of the heading."""
    _, *parts = re.split(r"^## ", (repository / "docs" / "upstream.md").read_text(), flags=re.MULTILINE)
    headings = [part.partition("\n") for part in parts]
    return {re.sub(r"[^\w ]", "", heading).lower().replace(" ", "-"): text for heading, _, text in headings}


def test_each_module_has_a_section_and_each_section_a_module(repository, sections):
    named = set()
    for path in (repository / "overlap" / "_compat").glob("*.py"):
        if path.stem in _MACHINERY:
            continue
        docstring = ast.get_docstring(tree_of(path)) or ""
        # The reason, the versions, the possible replacement, and the text.
        for word in ("Reason:", "0.11.2 and 0.12.0.1", "Replaced by:"):
            assert word in docstring, (path.name, word)
        (anchor,) = re.findall(r"For upstream: docs/upstream\.md#([\w-]+)\.", docstring)
        assert f"**Here:** `{path.name}`" in sections[anchor]
        named.add(anchor)
    assert named == sections.keys() and len(named) > 8


def test_jax_alone_fails_as_the_sections_say(repository, sections):
    """In a process without this library. If a reproducer no longer fails, jax is fixed and the workaround may go."""
    said = {anchor: re.findall(r"^- \*\*Error:\*\* `(.*)`$", text, re.MULTILINE) for anchor, text in sections.items()}
    assert {anchor for anchor, messages in said.items() if messages} == REPRODUCERS.keys()
    program = "from tests.docs import test_upstream; print(test_upstream.failures())"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, cwd=repository, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    failed = ast.literal_eval(done.stdout.splitlines()[-1])
    for anchor in REPRODUCERS:
        assert said[anchor][0] in failed.get(anchor, "nothing failed"), anchor
