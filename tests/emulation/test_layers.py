"""Each module of the emulator imports only from its own folder and from those below it, and never in a circle.

Neither the emulator nor these tests of it import `overlap`. tests/ops, tests/protocol and tests/tools run the emulator
with overlap's kernels.
"""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import mosaic_emulator

pytestmark = pytest.mark.one_jax
PACKAGE = pathlib.Path(mosaic_emulator.__file__).parent
# The folders, from the lowest to the highest; `cores` is a module that needs nothing.
LAYERS = ("cores", "foundations", "state", "execution", "instructions", "entry")


def imported(path, text):
    """Yields the parts of each imported name, also inside functions and under TYPE_CHECKING."""
    here = path.relative_to(PACKAGE.parent).parts[:-1]
    for node in ast.walk(ast.parse(text)):
        names = [tuple(alias.name.split(".")) for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            package = here[: len(here) - node.level + 1] if node.level else ()
            names = [(*package, *(node.module or "").split("."), alias.name) for alias in node.names]
        yield from (tuple(filter(None, name)) for name in names)


def imports(path, text):
    """Yields (folder, module) for each import from the emulator."""
    for name in imported(path, text):
        if name[0] == "mosaic_emulator":
            yield name[1], name[2] if len(name) > 2 else ""


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
        "def late():\n    from ..entry.sequence import World", "from mosaic_emulator.entry.sequence import World",
        "from ..entry import sequence", "if True:\n    import mosaic_emulator.entry.sequence",
    ):  # fmt: skip
        assert [*imports(PACKAGE / "state" / "memory.py", text)] == [("entry", "sequence")]


KNOWN = {*sys.stdlib_module_names, "jax", "ml_dtypes", "mosaic_emulator", "numpy", "pytest", "tests"}


def test_neither_the_emulator_nor_its_tests_import_overlap(repository):
    tests = [*(repository / "tests" / "emulation").glob("*.py"), repository / "tests" / "meshes.py"]
    for path in (*PACKAGE.rglob("*.py"), *tests):
        assert {name[0] for name in imported(path, path.read_text())} <= KNOWN, path


# In the child `import overlap` fails.
ALONE = """
import importlib, pathlib, re, sys
sys.modules["overlap"] = None
import mosaic_emulator
folder = pathlib.Path(mosaic_emulator.__file__).parent
modules = [path.relative_to(folder.parent).with_suffix("").parts for path in folder.rglob("*.py")]
for parts in modules:
    importlib.import_module(".".join(parts))
(example,) = re.findall(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
exec(compile(example, "README.md", "exec"), {})
assert not [name for name in sys.modules if name.startswith("overlap.")]
print(len(modules))
"""


@pytest.mark.all_cases
def test_without_overlap_all_modules_load_and_the_example_of_the_readme_runs(repository):
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    copies, *error, count = done.stdout.splitlines()
    assert copies == "2 copies, and the right sum" and int(count) > 40
    assert error[0] == "race on refs[0]:" and "TMA load, write" in error[3], error
