"""Benchmarks: one harness, one file per table."""

from overlap import _requirements

# All of them need jax. Where it cannot be imported, this one line is the answer to `python -m benchmarks.…`.
if _reason := _requirements.why_not():
    raise SystemExit(f"benchmarks: {_reason}; {_requirements.SEE_DOCTOR}")
