"""Fused collective matmuls: their public functions, schedules, kernels and transports."""
