"""A module imports only from its own floor and those below it (docs/DESIGN.md, "The floors").

The emulator, `mosaic_emulator`, imports nothing of `overlap` (tests/emulation/test_layers.py).
"""

import ast
import pathlib

import overlap
from tests.docs.sources import tree_of

PACKAGE = pathlib.Path(overlap.__file__).parent
# The floors from the bottom up. Packages in the same row may not import each other.
FLOORS = (
    ("_cuda", "_requirements", "_settings", "_version", "_xla_flags", "emulation"),
    ("_compat",),
    ("primitives",),
    ("kernels", "distributed"),
    ("choice",),
    ("frame",),
    ("single_gpu",),
    ("collectives",),
    ("sharded",),
    ("tuning",),
    ("__init__",),
    ("cli", "layers"),
    ("trainers",),
    ("__main__",),
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    """Returns the first part of a module's path in the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def rooms_of(tree):
    """Yields (package, line number) for each import of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "overlap":
            for alias in node.names:
                yield (alias.name if alias.name in FLOOR_OF else "__init__"), node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overlap."):
            yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "overlap":
                    yield (rest[0] if rest else "__init__"), node.lineno


def test_the_library_needs_no_other_folder_of_the_repository():
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"benchmarks", "examples", "lessons", "tests"}, path


def test_no_arrow_runs_up():
    assert set(map(room_of, MODULES)) == set(FLOOR_OF)
    for path in MODULES:
        room = room_of(path)
        for imported, line in rooms_of(tree_of(path)):
            assert imported == room or FLOOR_OF[imported] < FLOOR_OF[room], f"{path}:{line} imports {imported}"
