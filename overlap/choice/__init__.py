"""Chooses for each call the fused kernel or XLA, and the kernel's configuration, by measured tables or by a model.

Nothing is measured here (`overlap.tuning` does that). Operations are known by their names and sizes only.
"""
