"""The versions of Python and jax that the library needs, and the reason why it cannot be used with others.

This module imports only the standard library, since `python -m overlap doctor` must answer on an old Python and with a
broken jax. For the same reason this file, and all that `doctor` imports, has no syntax newer than Python 3.11.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

# pyproject.toml repeats these bounds for pip; tests/tools/test_without_jax.py compares them.
PYTHON = (3, 12)
# Also the range with which the changes of jax in overlap/_compat/ were checked.
JAX_FROM, JAX_BELOW = (0, 11, 2), (0, 13)
TESTED_JAX = ("0.11.2", "0.12.0.1")
NUMPY = "2.1"
SEE_DOCTOR = "see `python -m overlap doctor`"


def why_not_python(version: Sequence[Any] = sys.version_info) -> str | None:
    """The reason why this Python cannot run the library, or None."""
    if tuple(version[:2]) >= PYTHON:
        return None
    found = ".".join(map(str, version[:3]))
    needed = ".".join(map(str, PYTHON))
    return f"Python {found} is too old: overlap needs >= {needed}, such as from `uv venv --python {needed}` or pyenv"


def why_not_jax(version: str) -> str | None:
    """The reason why a version of jax is outside the supported range, or None."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    oldest, end = (".".join(map(str, bound)) for bound in (JAX_FROM, JAX_BELOW))
    if number < JAX_FROM:
        return f"jax {version} is too old: overlap needs >= {oldest} and < {end}"
    if number >= JAX_BELOW:
        return f"jax {version} is too new: overlap needs >= {oldest} and < {end}"
    return None


@functools.cache  # A jax whose import failed may end the process at a second attempt.
def why_not() -> str | None:
    """The reason why the library cannot be used in this process, in one line, or None. Imports jax.

    A jax that is newer than the supported range is no such reason. `doctor` reports it, and kernels that need a change
    of jax refuse it (`overlap/_compat/patch.py`).
    """
    if reason := why_not_python():
        return reason
    try:
        import numpy  # noqa: F401  Without NumPy, jaxlib prints a traceback of its own.
    except Exception as error:
        return f"numpy cannot be imported ({in_one_line(error)})"
    try:
        import jax
        import jaxlib  # noqa: F401  Without jaxlib, jax fails only at its first use.
    except Exception as error:  # A broken jaxlib may raise any exception.
        return f"jax cannot be imported ({in_one_line(error)})"
    version = getattr(jax, "__version__", None)
    if not isinstance(version, str):
        return f"`import jax` gives {getattr(jax, '__path__', jax)}, which is no jax: it has no version"
    reason = why_not_jax(version)
    return None if reason and "too new" in reason else reason


def in_one_line(error: BaseException) -> str:
    """An exception's type and message without line breaks, at most 400 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else text[:397] + "..."
