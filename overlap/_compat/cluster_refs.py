"""Mend: `plgpu.cluster_ref` of a part of a buffer, which begins at an index (jax 0.11).

Reason: a CTA reads a part of a buffer in the shared memory of another CTA of its cluster (`cluster_along="k"`). jax
0.11 moves the part's offset into the pointer, and gives the reference a type with offset 0. The instruction that reads
it expects the type of the part, with its offset, and the kernel is refused: "Expected type … for value …".

Change: for a part with an offset, `get_cluster_ref` maps the whole buffer to the other CTA, and then takes the same
part of it, so that the offset is kept as jax 0.12 keeps it. jax 0.12 needs no change.

Replaced by: jax 0.12.
For upstream: docs/upstream/cluster-ref-offsets.md.
"""

from __future__ import annotations

from typing import Any

from overlap._compat.mend import Mend, private, replace

_SHARED, _CLUSTER = 3, 7  # LLVM's numbers of the memory spaces


def _change() -> None:
    import jax

    if jax.__version_info__ >= (0, 12):
        return
    replace("jax.experimental.mosaic.gpu.utils", "get_cluster_ref", "keeps_offsets", _make)


def _make(given: Any) -> Any:
    def get_cluster_ref(ref: Any, dim: Any, idx: Any, generic: bool = True) -> Any:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import builtin

        llvm = private("jax.experimental.mosaic.gpu.utils", "llvm")

        of_part = ir.MemRefType(ref.type)
        strides, offset = of_part.get_strides_and_offset()
        if offset == 0:
            return given(ref, dim, idx, generic)
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        sizes = llvm.ArrayType.get(i64, of_part.rank)

        def description(space: int) -> Any:
            pointer = llvm.PointerType.get(space)
            return llvm.StructType.get_literal([pointer, pointer, i64, sizes, sizes])

        def reference(described: Any, layout: Any, space: int) -> Any:
            memory = of_part.memory_space if space == _SHARED else ir.IntegerAttr.get(i32, space) if space else None
            kind = ir.MemRefType.get(of_part.shape, of_part.element_type, layout, memory)
            return builtin.unrealized_conversion_cast([kind], [described])

        space = 0 if generic else _CLUSTER
        part = builtin.unrealized_conversion_cast([description(_SHARED)], [ref])
        # The buffer from its beginning, here and in the other CTA.
        zero = llvm.mlir_constant(ir.IntegerAttr.get(i64, 0))
        whole = reference(llvm.insertvalue(part, zero, [2]), ir.StridedLayoutAttr.get(0, strides), _SHARED)
        mapped = builtin.unrealized_conversion_cast([description(space)], [given(whole, dim, idx, generic)])
        return reference(llvm.insertvalue(mapped, llvm.extractvalue(i64, part, [2]), [2]), of_part.layout, space)

    return get_cluster_ref


CLUSTER_REFS = Mend("a CTA reads a part of a buffer of another CTA of its cluster", _change)
