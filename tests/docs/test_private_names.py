"""docs/private_names.md lists exactly the private names of jax that are used; each exists in the installed jax."""

from __future__ import annotations

import ast
import importlib

import pytest

from overlap import _requirements
from tests.docs import private_uses

RANGE = f"{'.'.join(map(str, _requirements.JAX_FROM[:2]))}–{_requirements.TESTED_JAX[-1].rsplit('.', 2)[0]}"


@pytest.fixture(scope="module")
def uses(repository):
    return private_uses.used(repository)


@pytest.fixture(scope="module")
def table(repository):
    return private_uses.listed((repository / "docs" / "private_names.md").read_text())


def test_the_table_has_all_that_is_used_and_nothing_else(uses, table):
    assert len(uses) > 40
    missing, unused = sorted(uses.keys() - table.keys()), sorted(table.keys() - uses.keys())
    assert not missing, f"add to docs/private_names.md: {missing}"
    assert not unused, f"take out of docs/private_names.md: {unused}"


def test_each_row_says_where_why_which_versions_and_what_instead(uses, table):
    for name, cells in table.items():
        where, reason, versions, instead = cells
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
        outside = {place for place in places if place.startswith("overlap") and place != "overlap/_compat"}
        allowed = {"overlap/emulation"} if name == "jax.interpreters.mlir._lowerings" else set()
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
    found = {name for name in private_uses._names(ast.parse(text)) if private_uses.is_private(name)}
    utils = "jax.experimental.mosaic.gpu.utils"
    assert found == {
        "jax._src.core", "jax._src.core.Thing", "jax._src.core.Thing.part", "jax._src.a.b.c", utils,
        f"{utils}.inline_ptx", f"{utils}.old", "jaxlib.client", "jax.sharding.Mesh._hidden",
        "jax.experimental.pallas.ops.gpu", "jax._src.b",
    }  # fmt: skip
