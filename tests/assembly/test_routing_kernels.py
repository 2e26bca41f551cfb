"""How many kernels and collectives XLA makes of `overlap.route`, compiled for H200s without a GPU.

From the command line, in the environment of `tests.assembly.assembly`, HLO of a case:
    python -m tests.assembly.assembly --op tests.assembly.test_routing_kernels:routed --devices 4 --shape 8192,8,128
"""

from __future__ import annotations

import collections
import pathlib
import re
from typing import Any

import pytest

from tests.assembly.assembly import Case, assemble_case, struct, unavailable_reason

# What the entry of a program and the computations that it calls have beside kernels.
FREE = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "partition-id", "replica-id", "after-all"}
CALLS = {"call", "while", "conditional", "async-start"}
COLLECTIVES = {"all-gather", "all-gather-start", "reduce-scatter", "reduce-scatter-start", "all-reduce",
               "all-reduce-start", "all-to-all", "collective-permute", "collective-permute-start"}  # fmt: skip


def launches(text: str) -> dict[str, int]:
    """Counts the kernels of an optimized program by kind: fusions, custom calls (dots among them), sorts and so on.

    Instructions inside a fusion are no kernels; those of a called computation are.
    """
    computations = dict[str, list[tuple[str, str]]]()
    entry = name = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = found[2]
            entry = name if found[1] else entry
            computations[name] = []
        elif name and (found := re.match(r"\s+(?:ROOT )?%[\w.\-]+ = .*? ([a-z][\w\-]*)\((.*)$", line)):
            computations[name].append((found[1], found[2]))
    counts = collections.Counter[str]()

    def visit(name: str) -> None:
        for operation, rest in computations[name]:
            if operation in CALLS:
                called = re.findall(r"(?:to_apply|body|condition|calls|_computation)=%([\w.\-]+)", rest)
                for other in called:
                    visit(other)
            elif operation not in FREE and not operation.endswith(("-done", "-update")):
                counts["collective" if operation in COLLECTIVES else operation] += 1

    visit(entry)
    return dict(counts)


def routed(case: Case, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """`route` with the gates: the arrays that kernels read, and `dropped` if the case says so."""
    import jax
    from jax.sharding import PartitionSpec as P

    import overlap

    tokens, k, experts = case.shape
    options = dict(case.config)
    with_dropped = options.pop("dropped", False)

    def lists(ids: Any, gates: Any) -> Any:
        found = overlap.route(ids, experts, "x", gates=gates, **options)
        used = found.positions, found.group_sizes, found.gates
        return (*used, found.dropped[None]) if with_dropped else used

    mapped = jax.shard_map(lists, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    ids, gates = (struct(mesh, (case.devices * tokens, k), dtype, P("x")) for dtype in ("int32", "float32"))
    return mapped, (ids, gates)


def expert_mlp(case: Case, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """The forward pass of a layer with DeepSeek-V3's router, its experts along "x"."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import AxisType, Mesh
    from jax.sharding import PartitionSpec as P

    from overlap import layers

    tokens, k, experts = case.shape
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))

    def build() -> Any:
        router = layers.SigmoidTopK(experts, groups=8, top_groups=4)
        return layers.ExpertMLP(256, 128, experts, k, axis="x", router=router, rngs=nnx.Rngs(0), mesh=mesh,
                                dtype=jnp.bfloat16, implementation="fused")  # fmt: skip

    graph, state = nnx.split(nnx.eval_shape(build))
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or jax.NamedSharding(mesh, P())),
        state,
        nnx.get_named_sharding(state, mesh),
    )
    x = struct(mesh, (1, case.devices * tokens, 256), "bfloat16", P(None, "x", None))
    return lambda state, x: nnx.merge(graph, state)(x), (state, x)


# Tokens of a device, k, experts; then what limits rows, and the most kernels.
CASES = [((8192, 8, 128), {}, 6), ((64, 8, 128), {}, 6), ((8192, 2, 8), {}, 6), ((8192, 8, 128), {"dropped": True}, 7),
         ((8192, 8, 128), {"capacity": 4000}, 7), ((8192, 8, 128), {"rows": 80000}, 12)]  # fmt: skip


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.parametrize(("shape", "config", "most"), CASES, ids=str)
def test_kernels_of_route(shape: Any, config: dict[str, Any], most: int, tmp_path: pathlib.Path) -> None:
    """Ids and gates travel by one call, and some kernels make the lists of rows."""
    path = tmp_path / "hlo"
    case = Case("tests.assembly.test_routing_kernels:routed", 4, shape, config=config)
    assert assemble_case(case, hlo=str(path)) == []
    found = launches(path.read_text())
    assert found.pop("collective") == 1
    assert set(found) == {"fusion"} and found["fusion"] <= most, found


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_a_layer_gathers_ids_and_gates_alone(tmp_path: pathlib.Path) -> None:
    """By one call. XLA's partitioner would also gather the logits of all devices, for `lax.top_k`."""
    path = tmp_path / "hlo"
    case = Case("tests.assembly.test_routing_kernels:expert_mlp", 4, (1024, 8, 64))
    names = {report.name for report in assemble_case(case, hlo=str(path))}
    # What was assembled before is not reported again.
    assert names - {"overlap_landing_place"} <= {"overlap_added_rows", "overlap_grouped_matmul"}
    text = path.read_text()
    # Nine of them are tables of tiles and what the kernels start with, and five say in which order tokens arrive; the
    # router has most of the others.
    assert launches(text)["fusion"] <= 48
    gathers = re.findall(r" = (.*?) all-gather(?:-start)?\(", text)
    assert len(gathers) == 1 and "f32[4096,8]" in gathers[0] and "s32[4096,8]" in gathers[0], gathers


def test_the_count_sees_kernels_in_each_form() -> None:
    text = """HloModule m
%fused (p: s32[4]) -> s32[4] {
  %p = s32[4]{0} parameter(0)
  ROOT %n = s32[4]{0} negate(%p)
}

%body (q: s32[4]) -> s32[4] {
  %q = s32[4]{0} parameter(0)
  ROOT %s = s32[4]{0} sort(%q), dimensions={0}
}

ENTRY %main (a: s32[4]) -> s32[4] {
  %a = s32[4]{0} parameter(0), sharding={replicated}
  %f = s32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  %g = ((s32[2]{0}), s32[4]{0}) all-gather-start(%f), channel_id=1
  %h = s32[4]{0} all-gather-done(%g)
  %w = s32[4]{0} while(%h), condition=%fused, body=%body
  %d = (f32[8]{0}, s8[16]{0}) custom-call(%w), custom_call_target="__cublas$gemm"
  ROOT %e = s32[4]{0} get-tuple-element(%d), index=0
}
"""
    assert launches(text) == {"fusion": 1, "collective": 1, "negate": 1, "sort": 1, "custom-call": 1}
