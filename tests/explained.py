"""`overlap.explain` of one call of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import overlap


def answer(op: Callable[..., Any], *args: Any, **kwargs: Any) -> overlap.Explanation:
    """The answer of `explain` about a function that calls one operation once."""
    (choice,) = overlap.explain(op, *args, **kwargs)
    return choice
