"""Handlers of the tensor core's instructions (`tcgen05`): mma, copies to tensor memory, and commits.

With a `collective_axis`, the pair of CTAs along that axis works together. Only the first CTA of the pair issues the
operation. The same call in the second CTA does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..execution import tensor_core
from ..execution.machine import Thread
from ..execution.program import Decoder, handles, predicate_of
from ..execution.references import RefPath
from ..foundations.equations import AxisName, Equation, value_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta


def _issuers(thread: Thread, axis: AxisName) -> Sequence[Cta]:
    """Returns the CTAs in which an operation of `thread` works; none if the thread's CTA is the second of a pair."""
    cta = thread.cta
    if axis is None:
        return (cta,)
    if cta.cluster is None:
        raise ProtocolError(f"collective_axis={axis!r} in a kernel without clusters")
    if list(cta.cluster.axes)[-1] != axis:
        raise ProtocolError(f"collective_axis={axis!r} must be the last axis of the cluster {cta.cluster.axes}")
    pair = cta.cluster.along(cta, (axis,))
    if len(pair) != 2:
        raise ProtocolError(f"collective_axis={axis!r} has {len(pair)} CTAs: a pair is needed")
    return pair if pair[0] is cta else ()


@handles("tcgen05_mma")
def _mma(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    if p.get("sparse"):
        raise NotImplementedError("tcgen05_mma of a sparse operand is not emulated")
    acc, a, b, accumulate, *rest = ins
    entries = {"acc": acc, "a": a, "b": b}
    barrier = rest.pop(0) if p["arrive"] else None
    if p["scaled"]:
        entries |= {"a_scale": rest.pop(0), "b_scale": rest.pop(0)}
    names = ("acc", "a", "b", "barrier", "a_scale", "b_scale")
    paths: dict[str, RefPath] = dict(zip(names, d.paths(rest, *(p[f"{name}_transforms_tree"] for name in names))))
    operands = [(paths[name], entry) for name, entry in entries.items()]
    adds, axis = d.leaf(accumulate), p["collective_axis"]

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env = thread.env
        ctas = _issuers(thread, axis)
        if not ctas:
            return
        views = [
            tensor_core.Operands(*(path.resolve_in(cta, thread, env[entry]) for path, entry in operands))
            for cta in ctas
        ]
        tensor_core.multiply(thread, views, accumulate=bool(value_of(adds, env)))
        if barrier is not None:
            tensor_core.commit(thread, [paths["barrier"].resolve_in(cta, thread, env[barrier]) for cta in ctas])


@handles("tcgen05_commit_arrive")
def _commit(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    ins, predicate = predicate_of(d, ins, p.get("has_user_predicate", False))
    barrier, *leaves = ins
    (path,) = d.paths(leaves, p["barrier_transforms_tree"])
    axis = p["collective_axis"]

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        ctas = _issuers(thread, axis)
        if ctas and predicate(thread.env):
            tensor_core.commit(thread, [path.resolve_in(cta, thread, thread.env[barrier]) for cta in ctas])


def _copy(d: Decoder, eqn: Equation, ins: list[int], convert: Callable[[np.ndarray], np.ndarray]) -> None:
    p = eqn.params
    smem, tmem, *leaves = ins
    source, target = d.paths(leaves, p["smem_tree"], p["tmem_tree"])
    axis = p["collective_axis"]

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env = thread.env
        ctas = _issuers(thread, axis)
        if ctas:
            views = [(source.resolve_in(c, thread, env[smem]), target.resolve_in(c, thread, env[tmem])) for c in ctas]
            tensor_core.copy(thread, views, convert)


@handles("async_copy_smem_to_tmem")
def _copy_operand(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    _copy(d, eqn, ins, lambda x: x)


def _unpack_scales(packed: np.ndarray) -> np.ndarray:
    """Returns the scales as [rows, blocks of k], from the order in which they lie in shared memory.

    In shared memory they have the shape [tiles of 128 rows, groups of 4 blocks, 32, 16]. For row r of the 32, the last
    dimension holds the 4 blocks each of the rows r, r + 32, r + 64 and r + 96. A pair with 64 rows in each CTA has the
    shape [1, groups, 64, 16]: the first half of the columns in 32 rows, then the second half.
    """
    tiles, groups, rows, _ = packed.shape
    split = packed.reshape(tiles, groups, rows // 32, 32, 4, 4).transpose(0, 2, 4, 3, 1, 5)
    return split.reshape(-1, groups * 4)


@handles("async_copy_scales_to_tmem")
def _copy_scales(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    _copy(d, eqn, ins, _unpack_scales)
