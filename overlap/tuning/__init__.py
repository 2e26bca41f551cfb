"""Measuring of operations.

This package has `autotune` and its search, the programs that are measured, how they are timed, and traces of kernels.
"""
