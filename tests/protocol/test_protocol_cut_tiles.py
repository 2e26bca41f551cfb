"""The protocols of tiles that are cut along k: clean under many schedules; defects are reported."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import overlap
from overlap import primitives
from overlap.emulation import DeadlockError, EmulationError, RaceError, emulate
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import partial_sums, product_kernel
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.operations import PLAIN
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tma import finish
from overlap.single_gpu import product
from overlap.single_gpu.matmul import MATMUL
from tests import oracle
from tests.ops.product_cases import integers, oracle_of
from tests.oracle import make_mesh, on_mesh

NOTHING = lambda *_, **__: None  # noqa: E731
STREAM_K = overlap.Config(tile_n=128, stages=2, stream_k=8)
CASES = {  # devices, cores, (m, n, k) of a shard, config
    "stream k": (1, 7, (256, 128, 448), STREAM_K),
    "stream k after a wave": (1, 4, (640, 128, 320), STREAM_K),
    "all-gather": (2, 9, (128, 128, 320), STREAM_K),
}


def kernel_of(name):
    """Returns the number of cores, a function that runs the kernel (traced at its first call), and the exact result."""
    devices, cores, (m, n, k), config = CASES[name]
    lhs, rhs = integers(1, devices * m, k), integers(2, k, devices * n)
    if devices == 1:
        plan = LaunchPlan(MATMUL, PLAIN, jnp.float32, Target("cpu", "cpu", cores), config)
        # `overlap.matmul` would reuse an earlier trace.
        function = jax.jit(lambda a, b: product.launch(Operands(a, (b,)), plan))
    else:
        function = on_mesh(make_mesh(x=devices), lambda a, b: oracle.fused(a, b, config=config))
    return cores, lambda: np.asarray(function(lhs, rhs)).astype(np.float32), oracle_of(lhs, rhs)


@pytest.mark.parametrize("name", CASES)
def test_clean(name):
    devices = CASES[name][0]
    cores, run_kernel, expected = kernel_of(name)
    for completion in ("late", "eager", "random"):
        for seed in range(10 if devices == 1 else 4):
            with emulate(cores=cores, completion=completion, scheduler="pct", seed=seed):
                result = run_kernel()
            np.testing.assert_array_equal(result, expected.astype(jnp.bfloat16) if devices > 1 else expected)


class Moved:
    """Wraps a reference and changes the indices of each access."""

    def __init__(self, ref, move):
        self.ref, self.move = ref, move

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return self.ref.at[self.move(*index)]

    def __setitem__(self, index, value):
        self.ref[self.move(*index)] = value


def move_sums(patch, move):
    make = product_kernel.PartialSums
    patch.setattr(product_kernel, "PartialSums", lambda sums, flags, **how: make(Moved(sums, move), flags, **how))


def move_flags(patch, *, signalled=lambda *index: index, awaited=lambda *index: index):
    """Changes which flag is raised and which flag is waited for."""
    make = product_kernel.PartialSums
    patch.setattr(
        product_kernel,
        "PartialSums",
        lambda sums, flags, **how: make(sums, types.SimpleNamespace(at=Unresolved(flags)), **how),
    )
    patch.setattr(
        partial_sums, "semaphore_signal", lambda flag: primitives.semaphore_signal(flag[0].at[signalled(*flag[1])])
    )
    patch.setattr(
        partial_sums, "semaphore_wait", lambda flag, n: primitives.semaphore_wait(flag[0].at[awaited(*flag[1])], n)
    )


class Unresolved:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        return self.ref, index


def do_not_wait_for_the_parts(patch):
    patch.setattr(partial_sums, "semaphore_wait", NOTHING)


def raise_the_flag_with_the_first_sums(patch):
    together = finish.finish_together

    def early(partial, shape, piece, hand_over, *rest):
        def signal_and_hand_over(sums):
            primitives.semaphore_signal(partial.flags.at[lax.axis_index(GRID_AXIS), piece.rank, piece.wg_tile_index])
            hand_over(sums)

        together(partial, shape, piece, signal_and_hand_over, *rest)

    patch.setattr(finish, "finish_together", early)
    patch.setattr(partial_sums, "semaphore_signal", NOTHING)


def never_raise_the_flag(patch):
    patch.setattr(partial_sums, "semaphore_signal", NOTHING)


def raise_the_next_workers_flag(patch):
    move_flags(patch, signalled=lambda worker, *rest: (lax.rem(worker + 1, 6), *rest))


def raise_the_first_workers_flag(patch):
    move_flags(patch, signalled=lambda worker, *rest: (first_of_tile(worker), *rest))


def first_of_tile(worker):
    """Returns the first worker of the tile. In the case "stream k", tiles have three parts."""
    return worker - lax.rem(worker, 3)


def wait_for_the_other_warpgroups_flag(patch):
    move_flags(patch, awaited=lambda worker, rank, warpgroup: (worker, rank, 1 - warpgroup))


def wait_for_the_first_part_only(patch):
    move_flags(patch, awaited=lambda worker, *rest: (first_of_tile(worker), *rest))


def one_flag_for_both_warpgroups(patch):
    move = lambda worker, rank, warpgroup: (worker, rank, 0)  # noqa: E731
    move_flags(patch, signalled=move, awaited=move)


def one_flag_for_all_workers(patch):
    move = lambda worker, *rest: (0, *rest)  # noqa: E731
    move_flags(patch, signalled=move, awaited=move)


def one_slot_for_two_workers(patch):
    move_sums(patch, lambda worker, *rest: (lax.div(worker, 2), *rest))


def count_the_slots_anew_for_each_piece(patch):
    piece = StreamK.piece

    def anew(self, cta, ordinal, rank=0):
        right = piece(self, cta, ordinal, rank)
        return dataclasses.replace(right, before=right.before * 0)

    patch.setattr(StreamK, "piece", anew)


@pytest.mark.parametrize("name", ["stream k", "stream k after a wave"])
def test_what_the_defects_are_made_of_is_harmless_by_itself(name, monkeypatch):
    move_sums(monkeypatch, lambda *index: index)
    move_flags(monkeypatch)
    cores, run_kernel, expected = kernel_of(name)
    with emulate(cores=cores):
        np.testing.assert_array_equal(run_kernel(), expected)


DEFECTS = [  # defect, case, error, words of some message
    (do_not_wait_for_the_parts, "stream k", RaceError, "output 1"),
    (raise_the_flag_with_the_first_sums, "stream k", RaceError, "output 1"),
    (never_raise_the_flag, "stream k", DeadlockError, "to reach 1, got 0"),
    (raise_the_first_workers_flag, "stream k", DeadlockError, "to reach 1, got 0"),
    (raise_the_next_workers_flag, "stream k", RaceError, "output 1"),
    (wait_for_the_other_warpgroups_flag, "stream k", RaceError, "output 1"),
    (wait_for_the_first_part_only, "stream k", RaceError, "output 1"),
    (one_flag_for_both_warpgroups, "stream k", RaceError, "output 1"),
    (one_flag_for_all_workers, "stream k", RaceError, "output 1"),
    (one_slot_for_two_workers, "stream k", RaceError, "output 1"),
    (count_the_slots_anew_for_each_piece, "stream k after a wave", RaceError, "TMA load, write"),
]


@pytest.mark.parametrize(
    ("defect", "name", "error", "words"), DEFECTS, ids=lambda x: getattr(x, "__name__", None) or str(x)
)
def test_each_defect_is_reported(defect, name, error, words, monkeypatch):
    defect(monkeypatch)
    cores, run_kernel, _ = kernel_of(name)
    for completion in ("late", "eager", "random"):
        for seed in range(2):
            with pytest.raises(EmulationError), emulate(cores=cores, completion=completion, seed=seed) as run:
                run_kernel()
            found = [report for report in run.errors if isinstance(report, error) and words in str(report)]
            assert found, [str(report) for report in run.errors]
            assert "device" in str(found[0]) and "CTA" in str(found[0]) and ".py:" in str(found[0])


def leave_the_last_part_out(total, sums, parts):
    return total(sums, parts - 1)


def add_the_parts_twice(total, sums, parts):
    return total(sums, parts) + total(sums, parts)


@pytest.mark.parametrize("mistake", [leave_the_last_part_out, add_the_parts_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["stream k", "all-gather"])
def test_wrong_sums_show_in_the_numbers(name, mistake, monkeypatch):
    """Waiting for all parts and adding others is not a race, so the comparison with the oracle must detect it."""
    monkeypatch.setattr(partial_sums, "_total", functools.partial(mistake, partial_sums._total))
    cores, run_kernel, expected = kernel_of(name)
    with emulate(cores=cores):
        result = run_kernel()
    assert not np.array_equal(result, expected)
    assert float(oracle.distance(jnp.asarray(result), jnp.asarray(expected))) > 0.1
