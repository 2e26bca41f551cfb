"""Compiles training steps of transformer blocks for four H200s without a GPU, and counts what the programs compute.

`counted` asks a child process, whose environment is that of `tests.assembly.assembly`. The model is that of
`python -m benchmarks step`, with a stand-in for attention. So one definition makes both programs: that with the layers
of `examples/plain_layers.py`, and that with `overlap.layers`.

From the command line: python -m tests.assembly.step_cases '[{"layers": "plain", "mesh": [2, 2]}]'
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.assembly.assembly import child_environment
from tests.assembly.targets import topology

COLLECTIVES = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
# Width, width of the MLP, heads, heads of keys and values, size of a head; then sequences and tokens. With smaller
# sizes XLA makes other programs: it pads products, and replaces small collectives.
SMALL = (512, 1536, 8, 4, 64), (8, 512)
# As Llama 3 8B. XLA joins the gathers of small weights to one, so all are whole at the same time; not of such weights.
LARGE = (4096, 14336, 32, 8, 128), (4, 2048)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A program to compile.

    Attributes:
      layers: "plain" or "overlap"; the products of "overlap" are computed by XLA.
      mesh: devices along the axes "fsdp" and "tensor".
      explicit: whether the axes are Explicit.
      keep_gathered: as the layers of "overlap" take it.
      blocks: how many blocks the model has.
      large: whether the sizes are `LARGE`.
    """

    layers: str
    mesh: tuple[int, int]
    explicit: bool = False
    keep_gathered: bool | None = None
    blocks: int = 1
    large: bool = False


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a device's program has.

    Attributes:
      operations: the number of dots, and of collectives of each kind, by the dtype and shape of the result.
      shard_maps: how often the program that is compiled enters a `shard_map`.
      temp_bytes: memory for what is neither an argument nor a result.
    """

    operations: dict[str, int]
    shard_maps: int
    temp_bytes: int


@functools.cache
def counted(*cases: StepCase) -> list[Counts]:
    """Returns the counts of programs, which one child process compiles."""
    given = json.dumps([dataclasses.asdict(case) for case in cases])
    command = [sys.executable, "-m", "tests.assembly.step_cases", given]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=280)
    if done.returncode:
        raise RuntimeError(f"compiling {cases} failed:\n{done.stderr[-4000:]}")
    return [Counts(**found) for found in json.loads(done.stdout.splitlines()[-1])]


# --- In the child process ---------------------------------------------------------------------------------------------


def count(text: str) -> dict[str, int]:
    """Counts the dots and collectives of a compiled program, by the dtype and shape of each result."""
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if not (match := re.search(r" = (.*?) ([a-z-]+)\(", line)):
            continue
        results, operation = match.groups()
        kind = operation.removesuffix("-start")
        if kind in COLLECTIVES or operation == "dot":
            shapes = re.findall(r"\w+\[[\d,]*\]", results)
            # What starts a collective returns its operands before its results.
            shapes = shapes[len(shapes) // 2 :] if operation != kind else shapes
            found.update(f"{kind} {shape}" for shape in shapes)
    return dict(sorted(found.items()))


def stand_in(query: Any, key: Any, value: Any) -> Any:
    """Takes the place of attention. It computes from all of the three, without a product."""
    import jax

    from benchmarks.step_program import HEADS as SPEC

    def local(query: Any, key: Any, value: Any) -> Any:
        return query * key.mean(2, keepdims=True) + value.mean(2, keepdims=True)

    return jax.shard_map(local, in_specs=SPEC, out_specs=SPEC, check_vma=False)(query, key, value)


def lowered(case: StepCase) -> Any:
    """Lowers the loss and the gradients of a case."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks import step_program

    step_program.attend = stand_in
    method = "plain"
    if case.layers != "plain":
        method = f"by XLA {case.keep_gathered}"
        options = {"implementation": "xla", "keep_gathered": case.keep_gathered}
        step_program.LAYERS[method] = "overlap.layers", options
    of_model, (sequences, tokens) = LARGE if case.large else SMALL
    sizes = step_program.Case(*of_model, case.blocks, sequences, tokens, *case.mesh)
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    mesh = Mesh(np.array(topology("h200", 4)).reshape(case.mesh), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        graph, abstract = nnx.split(nnx.eval_shape(lambda: step_program.Transformer(sizes, method)), nnx.Param)
        shardings = nnx.get_named_sharding(abstract, mesh)
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
        )
        between = NamedSharding(mesh, P("fsdp", "tensor", None))
        x = jax.ShapeDtypeStruct((sequences, tokens, sizes.hidden), jnp.bfloat16, sharding=between)

        def loss(params: Any, x: Any) -> Any:
            return jnp.mean(nnx.merge(graph, params)(x).astype(jnp.float32) ** 2)

        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
        return step.trace(params, x).lower(lowering_platforms=("cuda",))


def main(cases: Iterable[dict[str, Any]]) -> None:
    """Prints the counts of each case, as one line of JSON."""
    found = []
    for fields in cases:
        program = lowered(StepCase(**{**fields, "mesh": tuple(fields["mesh"])}))
        compiled = program.compile()
        entered = program.as_text().count("sdy.manual_computation")
        counts = Counts(count(compiled.as_text()), entered, compiled.memory_analysis().temp_size_in_bytes)
        found.append(dataclasses.asdict(counts))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
