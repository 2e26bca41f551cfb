"""The syntax trees of source files, each parsed once for all tests."""

import ast
import functools
import pathlib


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())
