"""Finds the names of a kernel's parameters, which messages call its buffers by.

jax passes on the names of scratch, but not those of operands and results, and no names through a wrapper such as
`lambda *refs: body(*refs)`. The lines in which the kernel was traced say which functions were called, and their source
has the names.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re

from ..foundations.equations import Jaxpr, open_jaxpr
from ..foundations.source_lines import lines_of

_Function = ast.FunctionDef | ast.Lambda


def of_kernel(jaxpr: Jaxpr) -> list[str]:
    """The names of a kernel's operands and results, in order; "" for each that is not known."""
    count, first = len(jaxpr.invars), jaxpr.eqns[0] if jaxpr.eqns else None
    # The scope around the whole kernel, which has its scratch, was not entered by a line of the user's.
    if first is not None and first.primitive.name == "run_scoped" and not lines_of(first):
        jaxpr = open_jaxpr(first.params["jaxpr"])
        scratch = len(jaxpr.invars)
    else:
        scratch = 0
    names = _of_function(jaxpr, count + scratch, scratch)
    return names[:count] if names else [""] * count


def of_scope(jaxpr: Jaxpr) -> list[str]:
    """The names of what a scope allocates."""
    given, count = _given(jaxpr), len(jaxpr.invars)
    found = _of_function(jaxpr, count, count) if "[" in "".join(given) else []
    return found or [name or f"scratch {i}" for i, name in enumerate(given)]


def _given(jaxpr: Jaxpr) -> list[str]:
    """The names that jax has for the arguments of a function; "" for each that it does not know."""
    names = list(getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ())
    return [name or "" for name in names] if len(names) == len(jaxpr.invars) else [""] * len(jaxpr.invars)


def _of_function(jaxpr: Jaxpr, count: int, scratch: int) -> list[str]:
    """The last `count` parameters of the function that was traced, behind wrappers with `*refs`; [] if not known.

    The last `scratch` of them must be what jax calls them, unless jax knows `*refs` alone.
    """
    given = _given(jaxpr) if scratch else []
    for eqn in jaxpr.eqns:
        called = [_parameters(frame) for frame in reversed(lines_of(eqn))]  # Outermost first.
        for names, rest in called:
            if rest:
                continue
            found = names[-count:] if count <= len(names) else []
            if found and (found[count - scratch :] == given or given[0].startswith(f"{called[0][1]}[")):
                return found
            break
    return []


@functools.lru_cache(maxsize=1024)
def _parameters(frame: str) -> tuple[list[str], str]:
    """The positional parameters of the function in whose lines a frame is, and the name of its `*refs`, or ""."""
    match = re.fullmatch(r"(.*?):(\d+)(?::(\d+))? \((.+)\)", frame)
    if match is None:
        return [], ""
    file, name, place = match[1], match[4], (int(match[2]), int(match[3] or 0))
    around = [node for node in _functions(file) if getattr(node, "name", "<lambda>") == name and _contains(node, place)]
    if not around:
        return [], ""
    innermost = max(around, key=lambda node: (node.lineno, node.col_offset)).args
    rest = innermost.vararg.arg if innermost.vararg else ""
    return [parameter.arg for parameter in (*innermost.posonlyargs, *innermost.args)], rest


def _contains(node: _Function, place: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) <= place <= (node.end_lineno or 0, node.end_col_offset or 0)


@functools.lru_cache(maxsize=64)
def _functions(file: str) -> list[_Function]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _Function)]
