"""Formulas for functions of f32 values that Mosaic GPU lacks and activations need: GELU, ELU, softplus and their like.

On an H100 each was at most 2 ulp from the true value, zeros, infinities and NaNs included. The comments tell the
largest error of millions of values in two simulations. "GPU" fuses products and sums, and lets division, `exp` and
`log` be off by 1 to 2 ulp. "IEEE" rounds each step, as the emulator does. Each polynomial has the smallest greatest
relative error on its interval that coefficients in f32 allow.

Steps are exact, or harmless, whether the compiler fuses a product and a sum or not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_INF = float("inf")
# log(2) as a sum of f32 numbers. Products of the first of them with integers below 2^9 are exact.
_LOG2E, _LN2 = 1.442695, (0.693145751953125, 1.4286068e-06)


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    *rest, highest = coefficients
    result = jnp.full_like(x, highest)
    for coefficient in reversed(rest):
        result = result * x + coefficient
    return result


def _with_sign_of(x: jax.Array, magnitude: jax.Array) -> jax.Array:
    return lax.select(x < 0, -magnitude, magnitude)


def _exp(x: jax.Array, rest: jax.Array | float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Returns an integer n and p, so that e^(x + rest) = 2^n · (1 + p) and |p| < 0.42. |rest| is small."""
    n = lax.round(x * _LOG2E, lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (x - n * _LN2[0]) + (rest - n * _LN2[1])
    return n, r + r * r * _polynomial(r, 0.49999997, 0.16666545, 0.041667465, 0.008366424, 0.0013868316)


def _expm1(x: jax.Array) -> jax.Array:  # GPU 1.5, IEEE 1.6 ulp
    # `exp2` of an integer is exact, on GPUs too. A quarter of the result does not overflow before the last step.
    n, p = _exp(lax.clamp(-20.0, x, 89.6))
    quarter = jnp.exp2(n - 2)
    return jnp.where(abs(x) < 2**-26, x, 4 * (quarter * p + (quarter - 0.25)))


def _log1p(x: jax.Array) -> jax.Array:  # GPU 1.5, IEEE 1.0 ulp
    u = 1 + x
    lost = jnp.where(u < _INF, x - (u - 1), 0)
    return jnp.where(abs(x) < 2**-12, x - x * x * 0.5, jnp.log(u) + lost / jnp.maximum(u, 1e-30))


def _erf(x: jax.Array) -> jax.Array:  # GPU 1.2, IEEE 1.4 ulp
    a = jnp.minimum(abs(x), 4)
    near = x + x * _polynomial(x * x, 0.12837915, -0.37612504, 0.11281922, -0.026770493, 0.004998959, -0.00060207996)
    log_erfc = _polynomial(
        a, 1.6645419e-04, 1.1277972, 0.636976, 0.10411384, -0.022315351, 3.0655458e-03, -1.9822817e-04
    )
    return jnp.where(a < 0.9, near, _with_sign_of(x, 1 - jnp.exp(-log_erfc)))


# erfc(a) · e^(a²) up to a = 1.1875, by powers of a - 0.5; beyond, less 0.5 / a, by powers of 1 / a - 0.5.
_ERFCX_NEAR = (
    0.6156903505325317, -0.51268876, 0.35934582, -0.22201538, 0.12417284, -0.06389673, 0.030666815, -0.014267553,
    0.0064009335, -0.0018761043,
)  # fmt: skip
_ERFCX_FAR = (
    0.005395673, -0.07281403, -0.18552649, 0.022833362, 0.06450216, -0.087031215, 0.06492221, -0.017471425,
    -0.06565588, 0.109451972,
)  # fmt: skip


def _erfc(x: jax.Array) -> jax.Array:  # GPU 2.0, IEEE 2.4 ulp
    a = jnp.minimum(abs(x), 10.1)
    is_near = a < 1.1875
    inverse = 1 / a
    near, far = a - 0.5, inverse - 0.5
    # The product of e^(-a²) = 2^n · (1 + p) and `large` + `small`. Both terms of `large` are exact.
    large = jnp.where(is_near, _ERFCX_NEAR[0], inverse * 0.5)
    far = far * _polynomial(far, *_ERFCX_FAR[1:]) + (inverse * (1 - inverse * a) * 0.5625 + _ERFCX_FAR[0])
    small = jnp.where(is_near, near * _polynomial(near, *_ERFCX_NEAR[1:]), far)
    high = lax.round(a * 256, lax.RoundingMethod.TO_NEAREST_EVEN) * 2**-8
    n, p = _exp(-high * high, (high - a) * (high + a))
    # The result may be subnormal; it is scaled last.
    result = (large + (small + (large + small) * p)) * jnp.exp2(n + 24) * 2**-24
    return jnp.where(x < 0, 2 - result, result)


FORMULAS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "erf": _erf,
    "erfc": _erfc,
    "expm1": _expm1,
    "log1p": _log1p,
    "one_minus_square": lambda x: (1 - x) * (1 + x),  # Of the derivative of tanh.
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, x)),
}
