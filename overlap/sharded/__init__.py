"""Products of global arrays, outside of `jax.shard_map`. The shardings of the arrays say what is communicated."""
