"""Tests that each module of the emulator imports only from layers below its own, wherever the import stands."""

import ast
import pathlib

import pytest

from overlap import emulation

PACKAGE = pathlib.Path(emulation.__file__).parent
# The layers from the lowest to the highest. Modules of one layer do not import each other.
LAYERS = {
    "foundations": (
        *("arithmetic", "clocks", "cores", "environment", "errors", "interrupt", "jax_rules", "ptx", "scheduler"),
        *("shadow", "tensor_views"),
    ),
    # Memory, words and barriers, the mesh, and what a user sets.
    "objects": ("memory", "mesh", "sync", "settings", "core_counts"),
    "accesses": ("races", "devices", "multicast", "runs"),
    "messages": ("report",),
    # The state that all launches have in common.
    "simulation": ("simulation",),
    "groups and orders": ("clusters", "orders"),
    # Operations that complete later than they are issued, and the memory that a reference stands for.
    "engines": ("engines", "references"),
    "programs": ("program", "tensor_queue", "counted_writes"),
    "names": ("parameters",),
    # One launch of one program: its threads.
    "launch": ("machine",),
    "tensor core": ("tensor_core", "deadlock", "registers"),
    "words of PTX": ("ptx_memory",),
    "instructions of PTX": ("ptx_meaning",),
    # Each of these modules turns equations of some primitives into instructions.
    "handlers": ("cluster_launch", "control", "data", "inline", "signals", "tcgen05", "tensor_memory", "transfers"),
    "handlers on top of others": ("scopes", "multimem", "cluster_stores"),
    # `sequence` runs launches one after the other; `decode` makes a kernel's program with all handlers.
    "sequences": ("sequence", "decode"),
    "ways in": ("lowering", "replay"),
    "context": ("context",),
    "public names": ("__init__",),
}
LAYER_OF = {module: number for number, modules in enumerate(LAYERS.values()) for module in modules}
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}


def imports(tree):
    """Yields (module, line) for each import from the emulator, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = (node.module or "") if node.level == 0 else f"overlap.emulation.{node.module or ''}".rstrip(".")
            if package == "overlap.emulation":
                for alias in node.names:
                    yield (alias.name if alias.name in MODULES else "__init__"), node.lineno
            elif package.startswith("overlap.emulation."):
                yield package.split(".")[2], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("overlap.emulation."):
                    yield alias.name.split(".")[2], node.lineno


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down(layer):
    for module in LAYERS[layer]:
        for imported, line in imports(ast.parse(MODULES[module].read_text())):
            message = f"{MODULES[module]}:{line} imports {imported}, which is not below it"
            assert LAYER_OF[imported] < LAYER_OF[module], message


def test_every_module_has_a_layer():
    assert set(LAYER_OF) == set(MODULES)


@pytest.mark.parametrize(
    "text",
    [
        "from .sequence import World",
        "from overlap.emulation.sequence import World",
        "from . import sequence",
        "import overlap.emulation.sequence",
        "def late():\n    from .sequence import World",
        "if TYPE_CHECKING:\n    from .sequence import World",
    ],
)
def test_each_form_of_an_import_is_seen(text):
    assert [module for module, _ in imports(ast.parse(text))] == ["sequence"]
