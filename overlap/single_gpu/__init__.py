"""The operation of one GPU: `matmul`."""
