#!/usr/bin/env bash
# jax and jaxlib 0.11.2 on CPUs: under jit, a reduction of `x @ w` is a random number where `w` is a constant of one value.
# Right are: the same outside of jit, `w` as an argument, and the product behind a barrier.
# Seen (x86-64, 2026-11-28): the wrong sums differ from run to run, 1e-3 to 1e38 in size, or NaN; the true one is about -1348.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, numpy as np

x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
true = x.astype(np.float64).sum() * 128
constant = [float(jax.jit(lambda x: jnp.sum(x @ jnp.ones((128, 128))))(x)) for _ in range(3)]
argument = float(jax.jit(lambda x, w: jnp.sum(x @ w))(x, jnp.ones((128, 128))))
behind = float(jax.jit(lambda x: jnp.sum(jax.lax.optimization_barrier(x @ jnp.ones((128, 128)))))(x))
print(f"true {true:.2f}; w as an argument {argument:.2f}; behind a barrier {behind:.2f}; constant w {constant}")
near = lambda value: abs(value - true) < 1
assert near(argument) and near(behind) and not any(map(near, constant)), "the behaviour has changed"
PYTHON
