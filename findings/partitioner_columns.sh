#!/usr/bin/env bash
# jax 0.11.2, 8 CPU devices: XLA's partitioner gets a plain product wrong. The rows are sharded over ("a", "b") and the contraction
# over "c"; the weights over "c" and "b"; the result as the left operand is. Wrong by both partitioners, Shardy and GSPMD.
# Right are: rows over ("b", "a"), and weights that are constrained to P("c", None) before the product.
# Seen (x86-64, 2026-11-28): differences of about 30 where the values are about 6; 4e-6 in the other two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
x, w = rng.standard_normal((8, 16, 32), np.float32), rng.standard_normal((32, 64), np.float32)
at = lambda array, spec: jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

def error(rows, gathered_first):
    def product(x, w):
        w = at(w, P("c", "b"))
        w = at(w, P("c", None)) if gathered_first else w
        return at(at(x, P(rows, None, "c")) @ w, P(rows, None, "c"))
    return float(np.abs(np.asarray(jax.jit(product)(x, w), np.float64) - x.astype(np.float64) @ w).max())

found = error(("a", "b"), False), error(("b", "a"), False), error(("a", "b"), True)
print("largest difference: rows over (a, b) {:.1e}, over (b, a) {:.1e}, weights gathered first {:.1e}".format(*found))
assert found[0] > 1 and max(found[1:]) < 1e-3, "the behaviour has changed"
PYTHON
