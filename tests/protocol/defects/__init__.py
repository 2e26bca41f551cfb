"""Defects of the library's kernels, made from their source: one changed statement each."""
