"""Finds the private names of jax that the sources use, in their syntax trees, and the names that the table lists.

A name of jax is private if it, or a module in its path, begins with an underscore; so is everything in `jaxlib` and
in the undocumented modules `jax.experimental.mosaic.gpu` and `jax.experimental.pallas.ops`. Recognized uses: imports,
attributes of what was imported, and names in strings that are passed to `private`, `replace`, `setattr`,
`import_module` and the like. If `import_module` gets an f-string, the package that the string begins with is counted.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

FOLDERS = ("overlap", "tests", "benchmarks", "examples", "launch", "setup")
_UNDOCUMENTED = ("jax.experimental.mosaic.gpu", "jax.experimental.pallas.ops", "jaxlib")
# Functions that take a module (or an object) and the name of an attribute, as a string.
_BY_MODULE, _BY_OBJECT = ("private", "replace"), ("setattr", "getattr", "delattr", "hasattr")
_IMPORTERS = ("import_module", "importorskip")
_MODULE_TABLES = ("setitem", "delitem")  # of pytest's monkeypatch, on `sys.modules`
# A file that contains none of these words uses no private name, so it need not be parsed.
_CANDIDATE = re.compile(
    r"jax\._src|mosaic\.gpu|mosaic import gpu|pallas\.ops|jaxlib|(?<!self)(?<!cls)\._[a-z]|[\"']_[a-z]"
    r"|import [^\n]*\b_[a-z]|^\s+_[a-z]\w*,?$",
    re.MULTILINE,
)


def is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] in ("jax", "jaxlib") and (hidden or any(name.startswith(f"{m}.") for m in _UNDOCUMENTED))


def _beginning(argument: ast.expr) -> str | None:
    """Returns the value of a string, or the package that an f-string begins with: a.b for f"a.b.{name}"."""
    if isinstance(argument, ast.JoinedStr):
        first = argument.values[0] if argument.values else None
        text = _beginning(first) if isinstance(first, ast.Constant) else None
        return text.rpartition(".")[0] if text else None
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields the full names of jax that a file uses; for `a.b.c` also `a.b`."""
    known: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                yield alias.name

    def full(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute) and (base := full(node.value)):
            return f"{base}.{node.attr}"
        return None

    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := full(node)):
            yield name
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = [a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else None for a in node.args]
            if called in _BY_MODULE and len(texts) > 1 and texts[0] and texts[1]:
                yield f"{texts[0]}.{texts[1]}"
            elif called in _BY_OBJECT and len(texts) > 1 and texts[1] and (base := full(node.args[0])):
                yield f"{base}.{texts[1]}"
            elif called in _IMPORTERS and node.args and (name := _beginning(node.args[0])):
                yield name
            elif called in _MODULE_TABLES and len(texts) > 1 and texts[1]:
                yield texts[1]


def used(repository: pathlib.Path) -> dict[str, set[str]]:
    """Maps each private name to the folders that use it, such as "overlap/_compat" or "tests"."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("*.py")):
            text = path.read_text()
            if "jax" not in text or not _CANDIDATE.search(text):
                continue
            names = {name for name in _names(ast.parse(text)) if is_private(name)}
            place = path.relative_to(repository).parent.as_posix()
            place = "/".join(place.split("/")[:2]) if folder == "overlap" else folder
            for name in names:
                # If a module and a name in it (or a class and its method) are both found, count only the longer name.
                if not any(other.startswith(f"{name}.") for other in names):
                    found.setdefault(name, set()).add(place)
    return found


def listed(page: str) -> dict[str, list[str]]:
    """Maps each name in the first column of the page's tables to the other columns."""
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}
