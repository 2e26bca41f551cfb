"""Measures the operations and kernels: a common harness, and a module for each table of results."""

from overlap import _requirements

# All benchmarks need jax. If jax cannot be imported, every `python -m benchmarks.…` ends with this line.
if _reason := _requirements.why_not():
    raise SystemExit(f"benchmarks: {_reason}; {_requirements.SEE_DOCTOR}")
