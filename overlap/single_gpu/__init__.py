"""The operation of a single GPU: `matmul`."""
