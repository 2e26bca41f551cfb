"""Chooses the fused kernel or XLA for each call, and the kernel's configuration, from measured tables or a model.

Nothing is measured here: `overlap.tuning` measures. These modules know an operation only by its name and its sizes.
"""
