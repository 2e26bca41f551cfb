"""Where a GPU places clusters, and the numbers by which they take tiles."""

import jax
import jax.numpy as jnp
import numpy as np

from overlap.kernels.placement import _DEALT, beside_neighbours, clusters_at_once, gpcs

PLACED = [*_DEALT, (2, 1), (2, 33), (2, 65), (2, 67), (2, 74), (4, 1), (4, 29), (4, 31)]


def test_new_numbers_are_a_permutation_traced_or_not():
    for cluster, clusters in PLACED:
        numbers = [beside_neighbours(i, cluster, clusters) for i in range(clusters)]
        assert sorted(numbers) == list(range(clusters)) and {type(number) for number in numbers} == {int}
        assert (numbers == list(range(clusters))) == ((cluster, clusters) not in _DEALT)
    for cluster, clusters in _DEALT:
        traced = jax.vmap(lambda i: beside_neighbours(i, cluster, clusters))(np.arange(clusters, dtype=np.int32))  # noqa: B023
        assert traced.dtype == jnp.int32
        np.testing.assert_array_equal(traced, [beside_neighbours(i, cluster, clusters) for i in range(clusters)])


def test_clusters_of_one_gpc_have_consecutive_numbers():
    for cluster, clusters, of_one_gpc in (
        (2, 66, (4, 12, 20, 28)), (2, 66, (11, 19, 27, 35)), (2, 66, (36, 43, 50, 57)), (2, 66, (42, 49, 56, 63)),
        (4, 30, (0, 8)), (4, 30, (7, 15)), (4, 30, (16, 23)), (4, 30, (22, 29)),
    ):  # fmt: skip
        numbers = [beside_neighbours(i, cluster, clusters) for i in of_one_gpc]
        assert len({*gpcs(cluster, clusters)[list(of_one_gpc)]}) == 1
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for cluster, clusters in [*PLACED, (1, 132), (1, 114), (1, 1)]:
        of_gpc = cluster * np.bincount(gpcs(cluster, clusters))
        measured = (cluster, clusters) in (*_DEALT, (1, 132))
        assert of_gpc.sum() == cluster * clusters and (not measured or (of_gpc.size == 8 and of_gpc.max() <= 18))
        if (cluster, clusters) in ((1, 132), (2, 66)):
            assert sorted(of_gpc) == [16] * 6 + [18] * 2


def test_clusters_that_run_at_a_time():
    for num_cores, cluster, most in (
        (132, 1, 132), (132, 2, 66), (132, 4, 30), (114, 2, 57), (114, 4, 25), (148, 2, 74), (5, 2, 2), (2, 2, 1),
        (4, 4, 1), (8, 4, 1), (12, 4, 2), (16, 4, 3),
    ):  # fmt: skip
        assert clusters_at_once(num_cores, cluster) == most and most * cluster <= num_cores
