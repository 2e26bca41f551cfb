"""Makes and checks products of operands with block scales, whose sums are exact.

Operands are small integers in 8 bits, and scales are powers of two. So a scale of the wrong block, row or column shows
in the result, whatever the order of summation.
"""

import jax.numpy as jnp
import numpy as np

import overlap
from overlap.emulation import emulate
from overlap.kernels.target import emulating

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
BLOCK = 32
F32 = dict(preferred_element_type=jnp.float32)


class Product:
    """Operands with block scales and their exact product. `lhs` has the batch dimension; `rhs` too if `both`."""

    def __init__(self, seed, m, n, k, *, left="mk", right="nk", batch=(), both=False, dtypes=(E4M3, E5M2)):
        chance = np.random.default_rng(seed)

        def operand(rows, batch, dtype):
            values = chance.integers(-3, 4, (*batch, rows, k)).astype(dtype)
            return values, (2.0 ** chance.integers(-2, 3, (*batch, rows, k // BLOCK))).astype(E8M0)

        (x, of_x), (y, of_y) = operand(m, batch, dtypes[0]), operand(n, batch if both else (), dtypes[1])
        wide = [v.astype(np.float32) * np.repeat(s.astype(np.float32), BLOCK, -1) for v, s in ((x, of_x), (y, of_y))]
        self.exact = wide[0] @ wide[1].swapaxes(-1, -2)
        turned = [v.swapaxes(-1, -2) if swap else v for v, swap in
                  ((x, left == "km"), (of_x, left == "km"), (y, right == "kn"), (of_y, right == "kn"))]  # fmt: skip
        self.lhs, self.lhs_scale, self.rhs, self.rhs_scale = map(jnp.asarray, turned)
        self.transposes = dict(transpose_lhs=left == "km", transpose_rhs=right == "nk")

    @property
    def scales(self):
        return dict(lhs_scale=self.lhs_scale, rhs_scale=self.rhs_scale)

    def __call__(self, implementation="xla", **more):
        keywords = F32 | self.transposes | self.scales | more
        return overlap.matmul(self.lhs, self.rhs, implementation=implementation, **keywords)

    def check(self, cores=2, settings=None, **more):
        """Runs the emulated kernel and compares every bit."""
        with emulating("blackwell"), emulate(cores=cores, **settings or {}) as run:
            actual = self("fused", **more)
            run.check()
        assert run.counts["mmas"] > 0
        np.testing.assert_array_equal(np.asarray(actual), self.exact)
        return run


def config(**fields):
    return overlap.Config(**dict(tile_m=128, tile_n=128, stages=3) | fields)
