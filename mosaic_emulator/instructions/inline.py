"""Inline code (`plgpu.inline_mgpu`): the decoder calls the function, as Mosaic GPU does, and translates its code.

The function gets references and scalars of a temporary MLIR module, into which it writes its code. The code's PTX
(`ptx`, `ptx_meaning`), and the few other operations that compute operands, become instructions of the emulated program.
Code that the decoder does not know is an error while the kernel is decoded. The message names the instruction and the
line of the call.

An emulated thread stands for a warp or a warpgroup. A predicate that elects one CUDA thread is true in it, and the
decoder notes that the predicate holds in one CUDA thread only (`registers.Frame`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..execution.machine import Thread
from ..execution.program import Decoder, Program, handles
from ..execution.references import RefPath
from ..execution.registers import LANES, SPECIAL, VARIES, WARPS, Frame, Getter, Unreadable
from ..foundations import ptx
from ..foundations.equations import ArrayType, Equation, JaxObject, Transform, is_semaphore
from . import ptx_meaning, ptx_memory

_NOTHING: frozenset[str] = frozenset()
_ARCHITECTURE = (9, 0)  # the GPU that inline code is told it is compiled for; code for other GPUs does the same
# The result of an operation without operands: (the value, or a function that computes it from the thread; between
# which CUDA threads it differs, as in `_Value.varies`).
Made = tuple[int | Getter, frozenset[str]]
_DYNAMIC = -(1 << 31)  # marks an index of `llvm.getelementptr` that is an operand


@functools.cache
def _mlir_context() -> ir.Context:
    """The MLIR context, made once for all calls: making one takes longer than translating most inline code."""
    return mlir.make_ir_context()


class _Context:
    """Stands in for Mosaic GPU's launch context.

    Attributes:
        device_ids: the ids of the mesh's devices, in order. The code may depend on them.
    """

    def __init__(self, device_ids: tuple[int, ...]):
        self.device_ids = device_ids

    def __getattr__(self, name: str) -> object:
        raise Unreadable(f"it asks the launch context for `{name}`")


class _Value:
    """An MLIR value.

    Attributes:
        number: the value, if it is known while the kernel is decoded.
        entry: the entry of the environment that holds the value, if the value is known only when the thread runs.
        varies: how the value differs between the CUDA threads of an emulated thread: by ``"lane"``, by ``"warp"``.
    """

    def __init__(self, number: int | None, entry: int | None = None, varies: frozenset[str] = _NOTHING):
        self.number, self.entry, self.varies = number, entry, varies

    @property
    def getter(self) -> Getter:
        number, entry = self.number, self.entry
        return (lambda thread: number) if entry is None else (lambda thread: thread.env[entry])  # pyright: ignore


@handles("inline_mgpu")
def _inline(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    p = eqn.params
    count = p["pytree_args"].num_leaves
    transforms = d.unflatten(p["pytree_ref_transforms"], ins[count:])
    try:
        with _mlir_context(), ir.Location.unknown():
            return _Reader(d, eqn, ins[:count], transforms).read()
    except (Unreadable, ptx.PtxError) as reason:
        function = p["mgpu_fn"]
        name = getattr(function, "__qualname__", str(function))
        raise NotImplementedError(f"the function {name} cannot be emulated: {reason}") from reason


class _Reader:
    """Decodes one call of inline code."""

    def __init__(self, d: Decoder, eqn: Equation, ins: list[int], transforms: list[Sequence[Transform] | None]):
        self._d, self._eqn, self._ins, self._transforms = d, eqn, ins, transforms
        self._values: dict[ir.Value, _Value] = {}
        self._results: dict[ir.Value, list[_Value]] = {}  # of inline PTX that has several
        self._references: dict[ir.Value, tuple[int, RefPath]] = {}
        self._addresses: dict[tuple[int, int], _Value] = {}

    def read(self) -> list[int]:
        p = self._eqn.params
        self._module, block = _module([self._type(v.aval, t) for v, t in zip(self._eqn.invars, self._transforms)])
        leaves = []
        with ir.InsertionPoint(block):
            for value, variable, entry, transforms in zip(
                block.arguments, self._eqn.invars, self._ins, self._transforms
            ):
                if _is_reference(variable.aval):
                    self._references[value] = (entry, self._d.path(transforms or ()))
                    leaves.append(value)
                else:
                    self._values[value] = self._scalar(entry, variable.aval.dtype)
                    signed = mgpu_utils.is_signed(variable.aval.dtype)
                    leaves.append(mgpu.FragmentedArray.splat(value, (), is_signed=signed))
            result = p["mgpu_fn"](_Context(self._d.program.device_ids), *jax.tree.unflatten(p["pytree_args"], leaves))
        for operation in block.operations:
            self._operation(operation)
        results = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, mgpu.FragmentedArray))
        return [self._result(array, v.aval) for array, v in zip(results, self._eqn.outvars, strict=True)]

    # ---- arguments and results ---------------------------------------------------------------------------------------

    def _type(self, aval: JaxObject, transforms: Sequence[Transform] | None) -> ir.Type:
        if not _is_reference(aval):
            if aval.shape:
                raise Unreadable(f"an argument is an array of shape {aval.shape}, and only scalars are emulated")
            return mgpu_utils.dtype_to_ir_type(aval.dtype)
        inner = aval.inner_aval
        shape = tuple(inner.shape)
        for transform in transforms or ():
            if hasattr(transform, "get_indexer_shape"):
                shape = tuple(transform.get_indexer_shape())
        element = ir.IntegerType.get_signless(32) if is_semaphore(inner) else mgpu_utils.dtype_to_ir_type(inner.dtype)
        strides = np.cumprod((1, *shape[:0:-1]))[::-1].tolist() if shape else []
        layout = ir.StridedLayoutAttr.get(ir.ShapedType.get_dynamic_stride_or_offset(), strides)
        return ir.MemRefType.get(shape, element, layout)

    def _scalar(self, entry: int, dtype: np.dtype) -> _Value:
        if dtype.kind not in "iub":
            raise Unreadable(f"a scalar argument of {dtype} is not emulated")
        mask = (1 << (1 if dtype.kind == "b" else 8 * dtype.itemsize)) - 1
        return self._emit(lambda thread: int(thread.env[entry]) & mask, "argument", _NOTHING)

    def _result(self, array: object, aval: ArrayType) -> int:
        if not isinstance(array, mgpu.FragmentedArray) or aval.shape or array.registers.size != 1:
            raise Unreadable("a result is no scalar")
        value, dtype, out = self._values[array.registers.item()], np.dtype(aval.dtype), self._d.new()
        if dtype.kind not in "iub":
            raise Unreadable(f"a result of {dtype} is not emulated")
        get, bits = value.getter, 8 * dtype.itemsize

        def run(thread: Thread) -> None:
            number = int(get(thread))
            if dtype.kind == "i":
                number = (number & ((1 << bits) - 1)) - ((number >> (bits - 1) & 1) << bits)
            thread.env[out] = bool(number) if dtype.kind == "b" else number

        self._d.emit(run, self._eqn, "result")
        return out

    # ---- operations --------------------------------------------------------------------------------------------------

    def _emit(self, get: Getter, name: str, varies: frozenset[str]) -> _Value:
        entry = self._d.new()
        self._d.emit(lambda thread: thread.env.__setitem__(entry, get(thread)), self._eqn, name)
        return _Value(None, entry, varies)

    def _operation(self, operation: ir.OpView) -> None:
        name = operation.operation.name
        if name == "llvm.inline_asm":
            self._assembly(operation)
        elif name in _EFFECTLESS:
            pass
        elif name == "builtin.unrealized_conversion_cast" and operation.operands[0] in self._references:
            self._references[operation.results[0]] = self._references[operation.operands[0]]
        elif name == "llvm.extractvalue":
            self._extract(operation)
        elif name in _COMPUTED:
            self._compute(operation, *_COMPUTED[name])
        elif name in _MADE:
            number, varies = _MADE[name](operation, self._d.program)
            if callable(number):
                self._values[operation.results[0]] = self._emit(number, name, varies)
            else:
                self._values[operation.results[0]] = _Value(number, None, varies)
        elif name == "llvm.getelementptr":
            self._element(operation)
        else:
            raise Unreadable(f"the operation {name} is not emulated")

    def _extract(self, operation: ir.OpView) -> None:
        (source,), (field, *_) = operation.operands, list(_attribute(operation, "position"))
        if source not in self._references:  # `source` holds several results of inline PTX.
            self._values[operation.results[0]] = self._results[source][field]
        elif field == 1:
            entry, path = self._references[source]
            if (entry, id(path)) not in self._addresses:
                self._addresses[entry, id(path)] = self._emit(
                    lambda thread: ptx_memory.address_of(*path.locate(thread, thread.env[entry])), "address", _NOTHING
                )
            self._values[operation.results[0]] = self._addresses[entry, id(path)]
        elif field == 2:  # The offset of the slice from the address is 0: the address is where the slice begins.
            self._values[operation.results[0]] = _Value(0)
        else:
            raise Unreadable("it asks for the strides of a reference")

    def _compute(self, operation: ir.OpView, function: Callable[..., int], identity: int | None) -> None:
        operands = [self._values[value] for value in operation.operands]
        varies = frozenset().union(*(value.varies for value in operands))
        result = operation.results[0]
        if identity is not None and operands[-1].number == identity:
            self._values[result] = operands[0]
            return
        mask = (1 << _bits(result.type)) - 1
        if "predicate" in operation.attributes:
            function = _comparison(_attribute(operation, "predicate").value, _bits(operation.operands[0].type))
        if all(value.entry is None for value in operands):
            self._values[result] = _Value(function(*(value.number for value in operands)) & mask, None, varies)
            return
        getters = [value.getter for value in operands]
        self._values[result] = self._emit(
            lambda thread: function(*(get(thread) for get in getters)) & mask, operation.operation.name, varies
        )

    def _element(self, operation: ir.OpView) -> None:
        base, *dynamic = (self._values[value] for value in operation.operands)
        size = _bits(_attribute(operation, "elem_type").value) // 8
        indices = list(_attribute(operation, "rawConstantIndices"))
        if len(indices) != 1:
            raise Unreadable("an address in a structure")
        index = dynamic[0] if indices[0] == _DYNAMIC else _Value(indices[0])
        start, step = base.getter, index.getter
        self._values[operation.results[0]] = self._emit(
            lambda thread: start(thread) + step(thread) * size, "address", base.varies | index.varies
        )

    # ---- PTX ---------------------------------------------------------------------------------------------------------

    def _assembly(self, operation: ir.OpView) -> None:
        code = ptx.parse(_attribute(operation, "asm_string").value)
        constraints = _attribute(operation, "constraints").value.split(",")
        results = sum(c.startswith("=") for c in constraints)
        d = self._d
        entries = {name: d.new() for name in code.registers}
        values = [_Value(None, d.new()) for _ in range(results)]
        values += [self._values[value] for value in operation.operands]
        varies = {}
        for n, value in enumerate(values):
            entries[f"${n}"] = d.new(value.number) if value.entry is None else value.entry
            varies[f"${n}"] = value.varies
        for i in code.instructions:
            for operand in (i.guard, *i.operands):
                operand = getattr(operand, "register", getattr(operand, "base", operand))
                if isinstance(operand, ptx.Register) and operand.name not in entries:
                    raise Unreadable(f"{i.text!r} names the operand {operand.name}, and there are {len(values)}")
        frame = Frame(entries, varies, code)
        cleared = [*(entries[name] for name in code.registers), *(entries[f"${n}"] for n in range(results))]
        self._run(code, frame, cleared)
        for n in range(results):
            values[n].varies = frame.varies[f"${n}"]
        if results == 1:
            self._values[operation.results[0]] = values[0]
        elif results:
            self._results[operation.results[0]] = values[:results]

    def _run(self, code: ptx.Code, frame: Frame, cleared: list[int]) -> None:
        """Emits the instructions of parsed PTX.

        Args:
            code: the PTX.
            frame: its registers.
            cleared: the entries (indices into the thread's values) of registers that hold no value at the beginning.
        """
        d, eqn = self._d, self._eqn

        def enter(thread: Thread) -> None:
            thread.orders.poll.begin(None)
            for entry in cleared:
                thread.env[entry] = None

        d.emit(enter, eqn, "inline code")
        chosen: list[tuple[int, frozenset[str]]] = []  # branches so far: (target, what its condition varies with)
        jumps, places = [], []
        for index, i in enumerate(code.instructions):
            places.append(d.here)
            under = frame.of_guard(i).union(*(by for target, by in chosen if target > index))
            if i.name == "bra":
                place = [0]
                jumps.append((place, i.target))
                run = ptx_meaning.branch(i, place, d.here)
                chosen.append((i.target or 0, under))
            else:
                run = ptx_meaning.meaning(frame, i, under)
            d.emit(ptx_meaning.guarded(frame, i, run), eqn, i.text, visible=i.name in ptx_meaning.VISIBLE)
        places.append(d.here)
        for place, target in jumps:
            place[0] = places[target]


def _module(types: list[ir.Type]) -> tuple[ir.Module, ir.Block]:
    """Makes an MLIR module with one empty function with arguments of `types`; returns it and the function's block."""
    module = ir.Module.create()
    number = ir.IntegerType.get_signless(32)
    for name, value in zip(("major", "minor"), _ARCHITECTURE):
        module.operation.attributes[f"mosaic_gpu.arch_{name}"] = ir.IntegerAttr.get(number, value)
    with ir.InsertionPoint(module.body):
        function = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get("inline"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
            },
            regions=1,
        )
    return module, function.regions[0].blocks.append(*types)


def _is_reference(aval: ArrayType) -> bool:
    return hasattr(aval, "inner_aval")


def _attribute(operation: ir.OpView, name: str) -> JaxObject:
    return operation.attributes[name]


def _bits(kind: ir.Type) -> int:
    """The number of bits of an integer or an address."""
    if isinstance(kind, ir.IntegerType):
        return kind.width
    return 64


def _comparison(predicate: int, bits: int) -> Callable[[int, int], int]:
    """Returns the function that a predicate of `arith.cmpi` stands for.

    The predicates are eq, ne; then lt, le, gt, ge of signed numbers; then the same four of unsigned numbers.
    """
    names = ("__eq__", "__ne__", *(("__lt__", "__le__", "__gt__", "__ge__") * 2))
    flip = 1 << (bits - 1) if 2 <= predicate < 6 else 0  # Signed numbers are in order once the sign bit is flipped.
    name = names[predicate]
    return lambda a, b: int(getattr(int(a) ^ flip, name)(int(b) ^ flip))


def _thread_number(operation: ir.OpView, program: Program) -> Made:
    if not _along_x(operation):
        return 0, _NOTHING
    return SPECIAL["%tid.x"], frozenset(VARIES["%tid.x"])


def _along_x(operation: ir.OpView) -> bool:
    return "dim<x>" in str(operation.attributes["dimension"]) or " x" in f" {operation.attributes['dimension']}"


def _constant(operation: ir.OpView, program: Program) -> Made:
    attribute = operation.attributes["value"]
    if isinstance(attribute, ir.BoolAttr):
        return int(attribute.value), _NOTHING
    if not isinstance(attribute, ir.IntegerAttr):
        raise Unreadable(f"the constant {attribute} is not emulated")
    return attribute.value & ((1 << _bits(operation.results[0].type)) - 1), _NOTHING


# MLIR operations without operands, by name.
_MADE: dict[str, Callable[[ir.OpView, Program], Made]] = {
    "arith.constant": _constant,
    "llvm.mlir.constant": _constant,
    "nvvm.elect.sync": lambda operation, program: (1, frozenset({"lane"})),
    "gpu.thread_id": _thread_number,
    "gpu.block_dim": lambda operation, program: (
        (program.num_threads or 1) * WARPS * LANES if _along_x(operation) else 1,
        _NOTHING,
    ),
}
# Operations that compute: (the function; the neutral second operand, with which the result is the first operand).
_COMPUTED: dict[str, tuple[Callable[..., int], int | None]] = {
    **dict.fromkeys(("arith.addi", "llvm.add"), (lambda a, b: a + b, 0)),
    **dict.fromkeys(("arith.subi", "llvm.sub"), (lambda a, b: a - b, 0)),
    **dict.fromkeys(("arith.muli", "llvm.mul"), (lambda a, b: a * b, 1)),
    **dict.fromkeys(("arith.andi", "llvm.and"), (lambda a, b: int(a) & int(b), None)),
    **dict.fromkeys(("arith.ori", "llvm.or"), (lambda a, b: int(a) | int(b), None)),
    **dict.fromkeys(("arith.xori", "llvm.xor"), (lambda a, b: int(a) ^ int(b), None)),
    **dict.fromkeys(("arith.shli", "llvm.shl"), (lambda a, b: a << b, 0)),
    **dict.fromkeys(("arith.shrui", "llvm.lshr"), (lambda a, b: a >> b, 0)),
    **dict.fromkeys(("arith.divui", "llvm.udiv"), (lambda a, b: a // b, 1)),
    **dict.fromkeys(("arith.remui", "llvm.urem"), (lambda a, b: a % b, None)),
    **dict.fromkeys(("arith.minui",), (min, None)),
    **dict.fromkeys(("arith.maxui",), (max, None)),
    **dict.fromkeys(("arith.cmpi", "llvm.icmp"), (lambda a, b: 0, None)),
    "arith.select": (lambda which, a, b: a if which else b, None),
    # Values have no sign, so widening keeps them. The mask narrows them.
    **dict.fromkeys(
        ("arith.index_cast", "arith.index_castui", "arith.extui", "arith.trunci", "llvm.zext", "llvm.trunc",
         "llvm.ptrtoint", "llvm.inttoptr"), (lambda a: a, None),
    ),
    # A shuffle that gives lane 0's value (a warp's number) to all lanes.
    "nvvm.shfl.sync": (lambda mask, value, lane, limit: value, None),
}  # fmt: skip
_EFFECTLESS = {"nvvm.bar.warp.sync"}
