"""Fused collective matmuls, their XLA references, and how one is chosen."""
