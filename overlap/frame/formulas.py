"""Formulas for elementwise functions that Mosaic GPU cannot compute for a block in registers, from those that it can.

On an H100 each was at most 2 ulp from the true value, zeros, infinities and NaNs included; `tan` is NaN from 12867 on.
The comments tell the largest error of millions of values in two simulations. "GPU" fuses products and sums, and lets
division, roots, `exp` and `log` be off by 1 to 2 ulp. "IEEE" rounds each step, as the emulator does. Each polynomial
has the smallest greatest relative error on its interval that coefficients in f32 allow.

Steps are exact, or harmless, whether the compiler fuses a product and a sum or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

_INF = float("inf")
# Constants as sums of f32 numbers. Products of the first part of log(2) with integers below 2^9 are exact.
_LOG2E, _LN2 = 1.442695, (0.693145751953125, 1.4286068e-06)
_PI, _HALF_PI = (3.1415927, -8.742278e-08), (1.5707964, -4.371139e-08)
# The first three have 11 bits each: their products with integers up to 2^13 are exact.
_HALF_PI_PARTS = (1.5703125, 0.00048351287841796875, 3.1385570764541626e-07, 6.07710063e-11)


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    *rest, highest = coefficients
    result = jnp.full_like(x, highest)
    for coefficient in reversed(rest):
        result = result * x + coefficient
    return result


def _with_sign_of(x: jax.Array, magnitude: jax.Array) -> jax.Array:
    return lax.select(x < 0, -magnitude, magnitude)


def _sqrt(x: jax.Array) -> jax.Array:
    """The root, which on GPUs is off by up to 2 ulp, after a step of Newton's."""
    root = jnp.sqrt(x)
    return jnp.where(x == 0, x, root + (0.5 * lax.rsqrt(x)) * (x - root * root))


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


def _quarter_exp(a: jax.Array) -> jax.Array:
    """A quarter of e^a, which does not overflow where sinh and cosh do not."""
    n, p = _exp(jnp.minimum(a, 89.6))
    quarter = jnp.exp2(n - 2)
    return quarter + quarter * p


def _sinh(x: jax.Array) -> jax.Array:  # GPU 1.7, IEEE 1.7 ulp
    quarter, z = _quarter_exp(abs(x)), x * x
    near = x + x * (z * _polynomial(z, 0.16666716, 0.008330271, 0.0002037334))
    return jnp.where(abs(x) < 1, near, _with_sign_of(x, 2 * quarter - 0.125 * (1 / quarter)))


def _cosh(x: jax.Array) -> jax.Array:  # GPU 1.5, IEEE 1.5 ulp
    quarter = _quarter_exp(abs(x))
    return 2 * quarter + 0.125 * (1 / quarter)


def _tan(x: jax.Array) -> jax.Array:  # GPU 1.7, IEEE 1.4 ulp up to 12867, above it NaN
    n = lax.round(x * (1 / _HALF_PI[0]), lax.RoundingMethod.TO_NEAREST_EVEN)
    first, second, third, fourth = _HALF_PI_PARTS
    exact = (x - n * first) - n * second
    coarse = exact - n * third
    lost = ((exact - coarse) - n * third) - n * fourth
    r = coarse + lost
    low = lost - (r - coarse)
    z = r * r
    cubic = _polynomial(z, 0.3333335, 0.13332672, 0.054059442, 0.021282814, 0.010837515, 8.419691e-05, 0.0043801516)
    rest = r * (z * cubic) + (low + low * z)
    tangent = r + rest
    inverse = 1 / tangent
    cotangent = inverse - inverse * (inverse * (rest - (tangent - r)))
    is_odd = n != 2 * lax.round(n * 0.5, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(x == 0, x, jnp.where(abs(x) < 12867, jnp.where(is_odd, -cotangent, tangent), jnp.nan))


def _atan(x: jax.Array) -> jax.Array:  # GPU 1.8, IEEE 1.7 ulp
    a = abs(x)
    t = jnp.where(a > 1, 1 / a, a)
    z = t * t
    cubic = _polynomial(
        z, -0.33333153, 0.19993767, -0.14211002, 0.106657684, -0.07551656, 0.043204635, -0.016363103, 0.0029193931
    )
    near = t + t * (z * cubic)
    magnitude = jnp.where(a > 1, _HALF_PI[0] - (near - _HALF_PI[1]), near)
    return jnp.where(x == 0, x, _with_sign_of(x, magnitude))


def _asin_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether |x| is below 0.5625, and then asin(x), else asin of the root of (1 - |x|) / 2."""
    a = abs(x)
    is_near = a < 0.5625
    z = jnp.where(is_near, a * a, (1 - a) * 0.5)
    s = jnp.where(is_near, x, _sqrt(z))
    return is_near, s + s * (z * _polynomial(z, 0.16667014, 0.074851, 0.04668736, 0.018511789, 0.051203486))


def _asin(x: jax.Array) -> jax.Array:  # GPU 1.7, IEEE 1.9 ulp
    is_near, part = _asin_parts(x)
    return jnp.where(is_near, part, _with_sign_of(x, (_HALF_PI[0] - 2 * part) + _HALF_PI[1]))


def _acos(x: jax.Array) -> jax.Array:  # GPU 1.4, IEEE 1.7 ulp
    is_near, part = _asin_parts(x)
    far = jnp.where(x > 0, 2 * part, _PI[0] - (2 * part - _PI[1]))
    return jnp.where(is_near, _HALF_PI[0] - (part - _HALF_PI[1]), far)


def _asinh_near(s: jax.Array) -> jax.Array:
    """The inverse of sinh for |s| < 1.2."""
    z = s * s
    cubic = _polynomial(
        z, -0.16666606, 0.07498169, -0.044449396, 0.029353298, -0.019140335, 0.010747835, -0.004487487, 0.0011749439,
        -0.00014090307,
    )  # fmt: skip
    return jnp.where(s == 0, s, s + s * (z * cubic))


def _log_of_sum(a: jax.Array, one: float) -> jax.Array:
    """Returns log(a + sqrt(a² + one)), and log(2 · a) where `one` does not matter."""
    is_large = a > 4096
    s = jnp.minimum(a, 4096)
    return jnp.log(jnp.where(is_large, a, s + _sqrt(s * s + one))) + jnp.where(is_large, 0.6931472, 0)


def _asinh(x: jax.Array) -> jax.Array:  # GPU 1.9, IEEE 1.4 ulp
    return jnp.where(abs(x) < 1.2, _asinh_near(x), _with_sign_of(x, _log_of_sum(abs(x), 1)))


def _acosh(x: jax.Array) -> jax.Array:  # GPU 2.0, IEEE 1.7 ulp
    return jnp.where(x < 3.8, 2 * _asinh_near(_sqrt((x - 1) * 0.5)), _log_of_sum(x, -1))


def _atanh(x: jax.Array) -> jax.Array:  # GPU 1.9, IEEE 1.2 ulp
    a, z = abs(x), x * x
    below, above = 1 - a, 1 + a
    inverse = 1 / below
    ratio = above * inverse
    ratio = ratio + inverse * ((above - ratio * below) + (a - (above - 1)))
    far = 0.5 * jnp.log(jnp.where(below > 0, ratio, jnp.where(below == 0, _INF, jnp.nan)))
    near = x + x * (z * _polynomial(z, 0.3333373, 0.19978186, 0.14669552, 0.08241538, 0.18177898))
    return jnp.where(a < 0.5, near, _with_sign_of(x, far))


def _cbrt(x: jax.Array) -> jax.Array:  # GPU 1.3, IEEE 0.8 ulp
    a = abs(x)
    root = jnp.exp2(jnp.log2(a) * (1 / 3))
    root = root - (root - a / (root * root)) * (1 / 3)
    return jnp.where((a > 0) & (a < _INF), _with_sign_of(x, root), x)


def _floor(x: jax.Array) -> jax.Array:
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(nearest > x, nearest - 1, nearest)


_FORMULAS: dict[str, Callable[..., jax.Array]] = {
    "acos": _acos, "acosh": _acosh, "asin": _asin, "asinh": _asinh, "atan": _atan, "atanh": _atanh, "cbrt": _cbrt,
    "ceil": lambda x: -_floor(-x), "cosh": _cosh, "erf": _erf, "erfc": _erfc, "expm1": _expm1, "floor": _floor,
    "is_finite": lambda x: abs(x) < _INF, "log1p": _log1p, "one_minus_square": lambda x: (1 - x) * (1 + x),
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, x)), "sinh": _sinh, "tan": _tan, "add_any": lax.add,
}  # fmt: skip


def formula(name: str, params: dict[str, Any], types: list[jax.ShapeDtypeStruct]) -> ClosedJaxpr | None:
    """Returns the formula for the primitive `name` with `params`, of operands of these types; None if there is none."""
    dtype = types[0].dtype

    def in_f32(*operands: jax.Array) -> jax.Array:
        result = _FORMULAS[name](*(x.astype(jnp.float32) for x in operands))
        return result if result.dtype == jnp.bool else result.astype(dtype)

    # Mosaic GPU has `not` for integers alone, and converts a number to a boolean by its last bit.
    is_boolean, function = dtype == jnp.bool, None
    if name in _FORMULAS and params.get("accuracy") is None and jnp.issubdtype(dtype, jnp.floating):
        function = in_f32
    elif name == "not" and is_boolean:
        function = functools.partial(lax.bitwise_xor, True)
    elif name == "convert_element_type" and params["new_dtype"] == jnp.bool and not is_boolean:
        function = functools.partial(jnp.not_equal, 0)
    elif name == "integer_pow" and params["y"] < 0:
        function = lambda x: 1 / lax.integer_pow(x, -params["y"])  # noqa: E731
    return None if function is None else jax.make_jaxpr(function)(*types)
