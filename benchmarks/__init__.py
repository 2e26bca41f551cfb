"""Benchmarks: one harness, one file per table."""
