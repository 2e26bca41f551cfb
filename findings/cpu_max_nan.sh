#!/usr/bin/env bash
# jax and jaxlib 0.11.2 on CPUs: `lax.pmax`, and `jnp.max` of an array that is sharded over devices, lose NaN.
# On one device a short array keeps it. `jnp.isnan(x).any()` and sums see it.
# Seen (x86-64, 2026-11-28): 3.0 for [1, nan, 3, 2] over 4 devices by both, nan on one device.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
values = np.array([1, np.nan, 3, 2], np.float32)
sharded = jax.device_put(values, NamedSharding(mesh, P("x")))
whole = float(jnp.max(jnp.asarray(values)))
of_all = float(jax.jit(jnp.max)(sharded))
pmax = float(jax.jit(jax.shard_map(lambda v: jax.lax.pmax(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(sharded)[0])
seen = bool(jax.jit(lambda v: jnp.isnan(v).any())(sharded))
print(f"one device {whole}; jnp.max over 4 devices {of_all}; lax.pmax {pmax}; isnan().any() {seen}")
assert np.isnan(whole) and of_all == pmax == 3.0 and seen, "the behaviour has changed"
PYTHON
