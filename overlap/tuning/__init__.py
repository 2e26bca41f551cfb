"""Measures operations: `autotune`, its search, the programs and times of all measurements, and traces of kernels."""
