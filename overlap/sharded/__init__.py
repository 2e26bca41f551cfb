"""Products of global arrays under plain `jax.jit`. The shardings of the arrays say what is communicated."""
