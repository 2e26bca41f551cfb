"""docs/private_names.md lists exactly the private names of jax that the sources use; each exists in the installed jax.

A name of jax is private if it, or a module in its path, begins with an underscore; so is everything in `jaxlib` and
in the undocumented modules `jax.experimental.mosaic.gpu` and `jax.experimental.pallas.ops`. The uses are found in the
syntax trees: imports, attributes of what was imported, and names in strings that are passed to `private`, `replace`,
`setattr`, `import_module` and the like. If `import_module` gets an f-string, the package that it begins with counts.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
from collections.abc import Iterator

import pytest

from overlap import _requirements
from tests.docs.sources import tree_of

PACKAGES = ("overlap", "mosaic_emulator", "lessons")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples", "launch", "setup")
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
            names = {name for name in _names(tree_of(path)) if is_private(name)}
            place = path.relative_to(repository).parent.as_posix()
            place = "/".join(place.split("/")[:2]) if folder == "overlap" else folder
            for name in names:
                # If a module and a name in it (or a class and its method) are both found, count only the longer name.
                if not any(other.startswith(f"{name}.") for other in names):
                    found.setdefault(name, set()).add(place)
    return found


# --- The page ---------------------------------------------------------------------------------------------------------

RANGE = f"{'.'.join(map(str, _requirements.JAX_FROM[:2]))}–{_requirements.TESTED_JAX[-1].rsplit('.', 2)[0]}"


@pytest.fixture(scope="module")
def uses(repository):
    return used(repository)


@pytest.fixture(scope="module")
def table(repository):
    """Maps each name in the first column of the page's tables to the other columns."""
    page = (repository / "docs" / "private_names.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_the_table_has_all_that_is_used_and_says_where_why_which_versions_and_what_instead(uses, table):
    assert len(uses) > 40
    missing, unused = sorted(uses.keys() - table.keys()), sorted(table.keys() - uses.keys())
    assert not missing, f"add to docs/private_names.md: {missing}"
    assert not unused, f"take out of docs/private_names.md: {unused}"
    for name, (where, reason, versions, instead) in table.items():
        assert set(where.replace("`", "").split(", ")) == uses[name], name
        assert reason and instead and versions == RANGE, name


def test_each_name_exists(table):
    """Checked in the versions that CI installs, without the optional packages of a machine with GPUs."""
    for name in table:
        module, found = name, None
        while found is None:
            module, _, _ = module.rpartition(".")
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                assert "." in module, name
        for part in name.removeprefix(f"{module}.").split("."):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{module}.{part}")


def test_only_compat_imports_what_is_hidden(uses):
    """Other parts of the library use only undocumented names, except for one hidden name that the emulator reads."""
    for name, places in uses.items():
        hidden = any(part.startswith("_") for part in name.split("."))
        outside = {place for place in places - {"overlap/_compat"} if place.split("/")[0] in PACKAGES}
        allowed = {"mosaic_emulator"} if name == "jax.interpreters.mlir._lowerings" else set()
        assert not hidden or outside <= allowed, (name, outside)


def test_the_scan_sees_every_way_to_use_a_name():
    text = """
import jax
from jax._src import core as c
from jax.experimental.mosaic.gpu import utils
utils.inline_ptx("", 1)
c.Thing.part()
private("jax._src.a", "b.c")
monkeypatch.setattr(utils, "old", 1)
pytest.importorskip("jaxlib.client")
importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")
monkeypatch.setitem(sys.modules, "jax._src.b", None)
jax.numpy.zeros, jax.__version__, jax.sharding.Mesh._hidden
"""
    found = {name for name in _names(ast.parse(text)) if is_private(name)}
    utils = "jax.experimental.mosaic.gpu.utils"
    assert found == {
        "jax._src.core", "jax._src.core.Thing", "jax._src.core.Thing.part", "jax._src.a.b.c", utils,
        f"{utils}.inline_ptx", f"{utils}.old", "jaxlib.client", "jax.sharding.Mesh._hidden",
        "jax.experimental.pallas.ops.gpu", "jax._src.b",
    }  # fmt: skip
