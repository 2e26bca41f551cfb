"""Checkpoints are interchangeable between the library's layers and flax's own layers, in both directions."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.layers.layer_cases import EXPLICIT_FIRST, Block, PlainBlock, make_mesh, numbers, spread

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed (extra `examples`)")
pytestmark = pytest.mark.one_jax


def parameters(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def shardings(module: nnx.Module) -> Any:
    return jax.tree.map(lambda x: x.sharding, parameters(module))


def assert_same(ours: nnx.Module, theirs: nnx.Module) -> None:
    """Names, shapes and values must be equal."""
    found, expected = numbers(ours), numbers(theirs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(jax.tree.leaves(found)) == 17


@pytest.mark.slow
@EXPLICIT_FIRST
def test_states(kind: Any) -> None:
    """nnx.state of one model, nnx.update of the other, as in docs/layers.md (test_layer_docs.py runs both)."""
    mesh, theirs = make_mesh(kind=kind), PlainBlock(nnx.Rngs(1), use_bias=True)
    spread(theirs)
    with jax.set_mesh(mesh):
        ours = Block(nnx.Rngs(0), use_bias=True)
        before = shardings(ours)
        nnx.update(ours, jax.device_put(parameters(theirs), before))
    assert shardings(ours) == before and ours.mlp.gate.kernel.get_metadata("out_sharding") is not None
    assert_same(ours, theirs)
    # And back, into another model on one device.
    back = PlainBlock(nnx.Rngs(2), use_bias=True)
    nnx.update(back, numbers(ours))
    assert_same(ours, back)


@EXPLICIT_FIRST
@pytest.mark.parametrize("written_by", ["plain", pytest.param("layers", marks=pytest.mark.slow)])
def test_orbax(written_by: str, kind: Any, tmp_path: pathlib.Path) -> None:
    """One model reads the checkpoint that the other wrote; each device reads only its own part."""
    theirs = PlainBlock(nnx.Rngs(1), use_bias=True)
    with jax.set_mesh(make_mesh(kind=kind)):
        ours = Block(nnx.Rngs(0), use_bias=True)
    writer, reader = (theirs, ours) if written_by == "plain" else (ours, theirs)
    spread(writer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.state(writer, nnx.Param))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nnx.state(reader, nnx.Param)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(reader, checkpointer.restore(tmp_path / "checkpoint", wanted))
    assert_same(ours, theirs)
