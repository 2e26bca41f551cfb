"""Single-GPU matmuls: the mainloop of each architecture, its configuration, and `matmul`."""
