"""Each module of the emulator imports only from its own folder and from those below it, and never in a circle."""

import ast
import graphlib
import pathlib

import pytest

from overlap import emulation

pytestmark = pytest.mark.one_jax
PACKAGE = pathlib.Path(emulation.__file__).parent
# The folders, from the lowest to the highest; `cores` is a module that needs nothing.
LAYERS = ("cores", "foundations", "state", "execution", "instructions", "entry")


def imports(path, text):
    """Yields (folder, module) for each import from the emulator, also inside functions and under TYPE_CHECKING."""
    here = ("overlap", *path.relative_to(PACKAGE.parent).parts[:-1])
    for node in ast.walk(ast.parse(text)):
        names = [tuple(alias.name.split(".")) for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            package = here[: len(here) - node.level + 1] if node.level else ()
            names = [(*package, *(node.module or "").split("."), alias.name) for alias in node.names]
        for name in (tuple(filter(None, name)) for name in names):
            if name[:2] == ("overlap", "emulation"):
                yield name[2], name[3] if len(name) > 3 else ""


def test_imports_go_down_and_never_in_a_circle():
    folders = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert folders == {"__init__", *LAYERS}
    for layer in LAYERS[1:]:
        needs = {}
        for path in (PACKAGE / layer).glob("*.py"):
            found = list(imports(path, path.read_text()))
            assert all(LAYERS.index(folder) <= LAYERS.index(layer) for folder, _ in found), f"{path} imports {found}"
            needs[path.stem] = {module for folder, module in found if folder == layer}
        graphlib.TopologicalSorter(needs).prepare()  # CycleError if modules import each other.


def test_each_form_of_an_import_is_seen():
    for text in (
        "def late():\n    from ..entry.sequence import World", "from overlap.emulation.entry.sequence import World",
        "from ..entry import sequence", "if True:\n    import overlap.emulation.entry.sequence",
    ):  # fmt: skip
        assert [*imports(PACKAGE / "state" / "memory.py", text)] == [("entry", "sequence")]
