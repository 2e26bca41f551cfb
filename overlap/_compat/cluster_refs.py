"""Patch: a CTA reads a part of a buffer of another CTA (`plgpu.cluster_ref`) that begins at an offset (jax 0.11).

Reason: a CTA reads a part of a buffer in the shared memory of another CTA of its cluster (`cluster_along="k"`). jax
0.11.2 adds the part's offset to the pointer, and gives the reference a type with offset 0. The instruction that reads
the part expects a type with the part's offset. So jax refuses the kernel: "Expected type … for value …".

Change: for a part with an offset, `get_cluster_ref` maps the reference with offset 0 to the other CTA, and then gives
the result the part's offset and type. A reference with offset 0 is left to jax's own function. jax 0.12 keeps offsets
itself, so there the patch does nothing (compared: the code of jax 0.11.2 and 0.12.0.1).

Replaced by: `get_cluster_ref` in jax 0.12.
For upstream: docs/upstream.md#parts-of-a-buffer-in-a-cluster.
"""

from __future__ import annotations

from overlap._compat.patch import Internal, Patch, replace

# LLVM's numbers of address spaces: of generic addresses, of this CTA's shared memory, and of the cluster's.
_GENERIC = 0
_SHARED = 3
_CLUSTER = 7


def _change() -> None:
    import jax

    if jax.__version_info__ >= (0, 12):
        return
    replace("jax.experimental.mosaic.gpu.utils", "get_cluster_ref", "keeps_offsets", _make)


def _make(given: Internal) -> Internal:
    def get_cluster_ref(ref: Internal, dim: Internal, idx: Internal, generic: bool = True) -> Internal:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import builtin
        from jaxlib.mlir.dialects import llvm

        # jax's own function is right for a reference with offset 0. So pass it the beginning of the buffer, and put the
        # part's offset into what it returns.
        part = ir.MemRefType(ref.type)
        strides, offset = part.get_strides_and_offset()
        # An offset that is known only when the kernel runs is a negative number here.
        if offset == 0:
            return given(ref, dim, idx, generic)
        i64 = ir.IntegerType.get_signless(64)

        def descriptor(ref: Internal, space: int) -> Internal:
            """Returns a reference as LLVM describes it: pointers to the buffer, the offset, sizes and strides."""
            pointer = llvm.PointerType.get(space)
            sizes = [llvm.ArrayType.get(i64, part.rank)] * 2 if part.rank else []
            return builtin.unrealized_conversion_cast(
                [llvm.StructType.get_literal([pointer, pointer, i64, *sizes])], [ref]
            )

        def reference(descriptor: Internal, offset: Internal, layout: Internal, memory: Internal) -> Internal:
            kind = ir.MemRefType.get(part.shape, part.element_type, layout, memory)
            return builtin.unrealized_conversion_cast([kind], [llvm.insertvalue(descriptor, offset, [2])])

        here = descriptor(ref, _SHARED)
        zero = llvm.mlir_constant(ir.IntegerAttr.get(i64, 0))
        at_beginning = reference(here, zero, ir.StridedLayoutAttr.get(0, strides), part.memory_space)
        mapped = given(at_beginning, dim, idx, generic)
        there = descriptor(mapped, _GENERIC if generic else _CLUSTER)
        memory = ir.MemRefType(mapped.type).memory_space
        return reference(there, llvm.extractvalue(i64, here, [2]), part.layout, memory)

    return get_cluster_ref


CLUSTER_REFS = Patch("a CTA reads a part of a buffer of another CTA of its cluster", _change)
