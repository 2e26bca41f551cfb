"""Programs: a kernel's jaxpr as a flat list of small functions with jumps, and the decoder that emits them.

Every variable gets an entry in the thread's environment. Calls are inlined; loops and branches become jumps. A thread
is then a program counter and a list of values, and a scheduler can stop it between instructions. The handlers of the
primitives are in `control`, `scopes`, `data`, `inline`, `transfers`, `signals`, `multimem`, `tensor_memory`,
`tcgen05` and `clusters`. They register themselves with `handles`, and `decode` imports them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.extend import core as jex_core

from ..foundations import arithmetic
from ..foundations.equations import (
    ArrayType,
    Atom,
    AxisName,
    Entry,
    Environment,
    Equation,
    JaxObject,
    Scalar,
    Transform,
    open_jaxpr,
    value_of,
)
from ..foundations.errors import NotEmulatedError
from ..foundations.source_lines import Instruction
from .references import RefPath

# An instruction: takes a `machine.Thread`, which stands above this module; returns True if the thread cannot go on.
Function = Callable[[Any], bool | None]
Handler = Callable[["Decoder", Equation, list[int]], list[int] | None]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorates a `handler(decoder, eqn, ins)`, to register it for primitives of these names.

    `ins` are the entries of the operands. The handler returns the entries of the outputs, if there are any.
    """

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Runner(Protocol):
    """A thread that runs instructions."""

    env: Environment
    pc: int


class Program:
    """A decoded kernel.

    Attributes:
        functions: the instructions.
        visible: for each instruction, whether other threads can observe it. Only before visible instructions can the
            scheduler stop a thread.
        instructions: for each instruction, its origin in the source.
        template: the initial environment: constants, and None for entries without a value.
        parameters: the entries of the kernel's parameters.
        aliases: input -> the output that uses the same memory.
        grid: the sizes of the grid's axes, then those of the cluster's axes.
        axis_names: the names of the axes of the grid, of the cluster and of the threads.
        words: the names of the semaphores that all CTAs share, in the order of their addresses.
        device_ids: the ids of the mesh's devices, in order.
    """

    def __init__(self):
        self.functions: list[Function] = []
        self.visible: list[bool] = []
        self.instructions: list[Instruction] = []
        self.template: Environment = []
        self.paths: list[RefPath] = []
        self.parameters: list[int] = []
        self.input_is_ref: list[bool] = []
        self.out_avals: tuple[ArrayType, ...] = ()
        self.aliases: dict[int, int] = {}
        self.grid: tuple[int, ...] = ()
        self.cluster: dict[AxisName, int] = {}
        self.axis_names: tuple[AxisName, ...] = ()
        self.num_threads: int | None = None
        self.has_barrier = True  # whether the framework runs a barrier over all devices before each launch
        self.words: list[str] = []
        self.device_ids: tuple[int, ...] = ()
        self.uses_tensor_memory = False
        self.ends_by_cluster = False  # whether CTAs share tensor memory: the CTAs of a cluster then end together
        self.cancels_clusters = False  # whether the kernel uses cluster launch control

    def forget_views(self) -> None:
        for path in self.paths:
            path.forget()


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of one kernel, kept so that `run_sequence` can run it again.

    Attributes:
        program: the decoded kernel.
        name: the kernel's name.
        mesh_shape: the sizes of the mesh's axes.
        devices: for each position of the mesh, row-major, the number of the device there.
        inputs: for each position, the operands' values.
        outputs: for each position, the results' values that the kept launch has computed.
    """

    program: Program
    name: str
    mesh_shape: dict[AxisName, int]
    devices: tuple[int, ...]
    inputs: list[list[np.ndarray]]
    outputs: list[list[np.ndarray]]


class Decoder:
    """Emits the instructions of one program."""

    def __init__(self, program: Program):
        self.program = program
        self.scope: dict[Atom, int] = {}
        self._constants: dict[tuple[type, object], int] = {}
        self._used: set[Atom] = set()
        self.warp_axes: list[AxisName] = []  # the axes of the maps over warps whose bodies are being decoded

    # ---- entries -----------------------------------------------------------------------------------------------------

    def new(self, value: object = None) -> int:
        """Makes an entry, which holds `value` in the initial environment, and returns it."""
        self.program.template.append(value)
        return len(self.program.template) - 1

    def constant(self, value: object, aval: ArrayType) -> int:
        """Returns the entry of a constant, and makes one if there is none."""
        if arithmetic.is_plain(aval):
            value = np.asarray(value).item()
            key = (type(value), value)
            if key not in self._constants:
                self._constants[key] = self.new(value)
            return self._constants[key]
        return self.new(np.asarray(value, aval.dtype) if hasattr(aval, "dtype") else value)

    def read(self, atom: Atom) -> int:
        """Returns the entry of a variable or literal of a jaxpr."""
        if isinstance(atom, jex_core.Literal):
            return self.constant(atom.val, atom.aval)
        return self.scope[atom]

    # ---- code --------------------------------------------------------------------------------------------------------

    @property
    def here(self) -> int:
        return len(self.program.functions)

    def emit(self, function: Function, eqn: Equation | None, name: str = "", *, visible: bool = False) -> None:
        """Appends an instruction.

        If it is `visible`, other threads can observe it, and the scheduler may stop a thread before it.
        """
        self.program.functions.append(function)
        self.program.visible.append(visible)
        self.program.instructions.append(
            Instruction(self.here - 1, name or (eqn.primitive.name.removesuffix("_p") if eqn else ""), eqn)
        )

    def instruction(self, eqn: Equation, name: str = "", *, visible: bool = False) -> Callable[[Function], Function]:
        """Decorates a function, to append it as an instruction (`emit`)."""

        def append(function: Function) -> Function:
            self.emit(function, eqn, name, visible=visible)
            return function

        return append

    def path(self, transforms: Iterable[Transform], *, clip: bool = False, multicast: bool = False) -> RefPath:
        path = RefPath(transforms or (), clip)
        if path.multicast is not None and not multicast:
            raise NotImplementedError(
                "a multicast_ref can only be the target of copy_smem_to_gmem, as on the GPU. Expected: that, or "
                "multimem_store or multimem_load_reduce"
            )
        self.program.paths.append(path)
        return path

    def paths(self, leaves: Sequence[int], *trees: JaxObject) -> list[RefPath]:
        """Decodes references, each with a tree of transforms or None. `leaves` are those of all trees, in order."""
        paths = []
        for tree in trees:
            count = 0 if tree is None else tree.num_leaves
            paths.append(self.path(() if tree is None else self.unflatten(tree, leaves[:count])))
            leaves = leaves[count:]
        return paths

    def unflatten(self, tree: JaxObject, entries: Sequence[int]) -> JaxObject:
        """Rebuilds `tree` as decoded parameters: its leaves are constants, or an `Entry` for each other value."""
        return tree.unflatten([self.leaf(s) for s in entries])

    def unflatten_entries(self, tree: JaxObject, entries: Sequence[int]) -> JaxObject:
        """Rebuilds `tree` from a flat list of entries, as a list [reference, transforms, operands...].

        The transforms are decoded into the form that `path` takes. The reference and the operands stay entries.
        """
        parts = tree.unflatten(list(entries))
        decoded = tree.unflatten([self.leaf(s) for s in entries])
        return [parts[0], decoded[1], *parts[2:]]

    def leaves(self, tree: JaxObject) -> JaxObject:
        """Decodes the entries in a device id, which is None, a scalar, a tuple or a dict."""
        if isinstance(tree, dict):
            return {k: self.leaves(v) for k, v in tree.items()}
        if isinstance(tree, (tuple, list)):
            return tuple(self.leaves(v) for v in tree)
        return None if tree is None else self.leaf(tree)

    def leaf(self, entry: int) -> Scalar:
        """Turns an entry into a decoded parameter: its value if it is a constant scalar, else an `Entry`."""
        value = self.program.template[entry]
        return value if type(value) in (int, bool) else Entry(entry)

    def move(self, sources: Sequence[int], targets: Sequence[int], eqn: Equation) -> None:
        """Emits a copy of values. All values are read before any is written, as a loop's carry needs."""
        pairs = [(s, t) for s, t in zip(sources, targets) if s != t]
        if not pairs:
            return
        sources, targets = zip(*pairs)

        def run(thread: Runner) -> None:
            env = thread.env
            for target, value in zip(targets, [env[s] for s in sources]):
                env[target] = value

        self.emit(run, eqn, "move")

    def jump(self, eqn: Equation) -> Callable[[int], None]:
        """Emits a jump whose target is set later by the returned function."""
        target = [0]

        def run(thread: Runner) -> None:
            thread.pc = target[0]

        self.emit(run, eqn, "jump")
        return lambda pc: target.__setitem__(0, pc)

    def inline(self, jaxpr: JaxObject, arguments: Sequence[int], constants: Sequence[int] | None = None) -> list[int]:
        """Emits the equations of `jaxpr`, whose arguments are in these entries; returns the entries of its results."""
        closed_constants = getattr(jaxpr, "consts", ())
        jaxpr = open_jaxpr(jaxpr)
        if constants is None:
            constants = [self.constant(c, v.aval) for c, v in zip(closed_constants, jaxpr.constvars)]
        outer, self.scope = self.scope, {}
        outer_used, self._used = (
            self._used,
            {
                v
                for v in (*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars))
                if not isinstance(v, jex_core.Literal)
            },
        )
        self.scope.update(zip(jaxpr.constvars, constants))
        self.scope.update(zip(jaxpr.invars, arguments))
        for eqn in jaxpr.eqns:
            self._equation(eqn)
        results = [self.read(v) for v in jaxpr.outvars]
        self.scope, self._used = outer, outer_used
        return results

    def is_used(self, variable: Atom) -> bool:
        """Whether anything in the jaxpr that is being decoded reads `variable`."""
        return variable in self._used

    def _equation(self, eqn: Equation) -> None:
        ins = [self.read(v) for v in eqn.invars]
        name = eqn.primitive.name.removesuffix("_p") if eqn.primitive.name != "copy_p" else "copy"
        handler = _HANDLERS.get(name)
        try:
            outs = handler(self, eqn, ins) if handler is not None else self._compute(eqn, ins)
        except NotEmulatedError:  # The error is of an equation inside this one, and names that equation's line.
            raise
        except NotImplementedError as reason:
            raise NotEmulatedError(f"at {Instruction(0, name, eqn).source}: {reason}") from reason
        self.scope.update(zip(eqn.outvars, outs or ()))

    def _compute(self, eqn: Equation, ins: list[int]) -> list[int]:
        """Emits an equation without side effects; returns the entries of its outputs."""
        if eqn.effects and not arithmetic.is_known(eqn):
            raise NotImplementedError(
                f"the primitive {eqn.primitive.name} is not emulated (docs/EMULATION.md lists what is not)"
            )
        function, multiple = arithmetic.implementation(eqn)
        outs = [self.new() for _ in eqn.outvars]
        if multiple:

            def run_multiple(thread: Runner) -> None:
                env = thread.env
                for out, value in zip(outs, function(*[env[i] for i in ins])):
                    env[out] = value

            self.emit(run_multiple, eqn)
            return outs
        (out,) = outs
        values = [self.leaf(i) for i in ins]
        if all(type(v) is not Entry for v in values) and arithmetic.is_plain(eqn.outvars[0].aval):
            return [self.constant(function(*values), eqn.outvars[0].aval)]
        if len(ins) == 1:
            (a,) = ins

            def run(thread: Runner) -> None:
                env = thread.env
                env[out] = function(env[a])
        elif len(ins) == 2:
            a, b = ins

            def run(thread: Runner) -> None:
                env = thread.env
                env[out] = function(env[a], env[b])
        else:

            def run(thread: Runner) -> None:
                env = thread.env
                env[out] = function(*[env[i] for i in ins])

        self.emit(run, eqn)
        return outs


def predicate_of(d: Decoder, entries: list[int], present: bool) -> tuple[list[int], Callable[[Environment], bool]]:
    """Splits a predicate off the end of an operation's entries, if one is `present`.

    Returns:
        (the other entries, a function from the environment to the predicate's value). Without a predicate, the function
        returns True.
    """
    if not present:
        return entries, lambda env: True
    *rest, last = entries
    leaf = d.leaf(last)
    return rest, lambda env: bool(value_of(leaf, env))
