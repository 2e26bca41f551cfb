"""Kernels are assembled in a thread while others are lowered, once each, and without any effect on the program."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice import dispatch
from overlap.kernels import ahead
from overlap.kernels.target import Target


@pytest.fixture
def begun(monkeypatch):
    """The texts of the kernels that are assembled. The first one cannot be."""
    texts = []

    def assemble(device, kernel_hash, text):
        texts.append(text)
        if len(texts) == 1:
            raise jax.errors.JaxRuntimeError("this kernel cannot be assembled")

    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    monkeypatch.setattr(ahead, "_assemble", assemble)
    return texts


def lower(rows):
    """Lowers two kernels, of sizes that no other test has."""

    def twice(x, y):
        for _ in range(2):
            x = overlap.matmul(x, y, activation=jnp.tanh, implementation="fused")
        return overlap.matmul(x, y, implementation="fused")

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 320), (320, 320))]
    return jax.jit(twice).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


def test_each_kernel_is_begun_once(begun, monkeypatch):
    monkeypatch.setattr(ahead, "_device", lambda context: jax.devices()[0])
    for _ in range(2):
        text = lower(456)
        ahead._worker.join(10)
        assert len(begun) == len(set(begun)) == len(set(re.findall(r"kernel_hash = \S+", text))) == 2
    assert not ahead._waiting


class Gpu:
    platform = "gpu"


HERE = [Gpu(), Gpu()]
THERE = [Gpu(), Gpu()]


def context(**axis_context):
    return types.SimpleNamespace(platforms=("cuda",), axis_context=types.SimpleNamespace(**axis_context))


def mesh(devices):
    """A mesh as jax makes it, of devices that are none."""
    made = object.__new__(jax.sharding.Mesh)
    vars(made)["devices"] = np.array(devices, object)
    return made


@pytest.mark.parametrize(("where", "device"), [
    ({"mesh": mesh(HERE[:1])}, HERE[0]), ({"mesh": mesh(HERE)}, HERE[0]),
    ({"mesh": mesh([HERE[0], *THERE])}, HERE[0]),
    ({"mesh": mesh([*THERE, HERE[1]])}, HERE[1]), ({"mesh": mesh(THERE)}, None),
    ({"num_devices": 1, "device_assignment": None}, HERE[0]), ({"num_devices": 4, "device_assignment": None}, None),
    ({"num_devices": 2, "device_assignment": (THERE[0], HERE[1])}, HERE[1]), ({"device_assignment": (*THERE,)}, None),
])  # fmt: skip
def test_a_gpu_of_this_process_assembles(monkeypatch, where, device):
    monkeypatch.setattr(jax, "local_devices", lambda: HERE)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ahead._compat, "backends_are_initialized", lambda: True)
    given = context(**where)
    assert ahead._device(given) is device
    given.platforms = ("cpu",)
    assert ahead._device(given) is None


def test_without_a_gpu_nothing_is_begun(begun):
    lower(472)
    assert not begun and not ahead._waiting
