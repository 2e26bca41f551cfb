"""Products of global arrays under plain `jax.jit`: what is communicated follows from how they are sharded."""
