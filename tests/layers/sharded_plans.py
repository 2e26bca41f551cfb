"""Simulates a plan in NumPy: computes every device's part according to the table of `overlap/sharded/plan.py`."""

import itertools
import math

import numpy as np

LHS, RHS, OUT = ("b", "m", "k"), ("k", "n"), ("b", "m", "n")
# The places where an axis may occur in the left operand, the right operand and the result.
PLACES = list(itertools.product((None, *LHS), (None, *RHS), (None, *OUT)))


def partitions(names, order, *places):
    """Returns the three arrays' partitions if axis `names[i]` is at `places[i]` (None: nowhere), axes in this order."""
    axes = [(names[i], places[i]) for i in order]
    return tuple(
        tuple(tuple(name for name, place in axes if place[array] == dimension) for dimension in dimensions)
        for array, dimensions in enumerate((LHS, RHS, OUT))
    )


def every(names):
    """Yields all (lhs, rhs, out) partitions with these axes, in each order of the axes."""
    found = {}
    for chosen in itertools.product(PLACES, repeat=len(names)):
        for order in itertools.permutations(range(len(names))):
            found[partitions(names, order, *chosen)] = None
    return list(found)


def drawn(chance, names):
    """Draws one of the partitions of `every` at random."""
    return partitions(names, chance.sample(range(len(names)), len(names)), *chance.choices(PLACES, k=len(names)))


def part(x, partition, sizes, coordinates):
    """Returns the part of array `x` that the device at `coordinates` holds."""
    for dimension, axes in enumerate(partition):
        x = block(x, dimension, axes, sizes, coordinates)
    return x


def block(x, dimension, axes, sizes, coordinates):
    """Returns a device's block of a dimension. Blocks are numbered row-major over the axes."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return np.split(x, math.prod(sizes[axis] for axis in axes), dimension)[index]


def peers(axes, sizes, coordinates):
    """Returns the coordinates of a device and of its peers along some axes, in row-major order."""
    for index in itertools.product(*(range(sizes[axis]) for axis in axes)):
        yield coordinates | dict(zip(axes, index, strict=True))


def computed(plan, lhs, rhs, sizes):
    """Maps each device's coordinates to its part of the result, computed from whole operands."""

    def weights(at):
        if not plan.gathers:
            return part(rhs, plan.rhs, sizes, at)

        def gathered(at, gathers):
            if not gathers:
                return part(rhs, plan.rhs, sizes, at)
            (dimension, axes), *others = gathers
            return np.concatenate([gathered(other, others) for other in peers(axes, sizes, at)], dimension)

        return gathered(at, plan.gathers[::-1])

    def left(at):
        return part(lhs, plan.lhs, sizes, at)

    def result(at):
        around = list(peers(plan.axes, sizes, at))
        match plan.operation:
            case "matmul":
                return left(at) @ weights(at)
            case "all_gather_lhs_matmul":
                return np.concatenate([left(other) for other in around], plan.dimension) @ weights(at)
            case "all_gather_rhs_matmul":
                return left(at) @ np.concatenate([weights(other) for other in around], plan.dimension)
            case "matmul_all_reduce":
                return sum(left(other) @ weights(other) for other in around)
            case "matmul_reduce_scatter":
                whole = sum(left(other) @ weights(other) for other in around)
                return block(whole, plan.dimension, plan.axes, sizes, at)

    for index in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, index, strict=True))
        yield at, result(at)
