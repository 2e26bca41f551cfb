"""A table of kernels with one mistake each, and the check of their reports: right type, where, what, the way out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.emulation import EmulationError, emulate
from tests.emulation.cases import make_mesh, normal, out_type, place, run_kernel, sharded

X = normal(64, 64)


class Reports:
    """A decorator for kernels with a mistake, and the cases that it has collected."""

    def __init__(self):
        self.cases = []

    def __call__(self, error, *words, x=X, out=X.shape, settings=None, axes=None, located=True, **kwargs):
        """States the error and some of its words. `axes`: the kernel runs on a mesh of these sizes, one is "x"."""

        def add(body):
            case = (body, error, words, x, out, settings or {}, axes, located, kwargs)
            self.cases.append(pytest.param(case, id=body.__name__))
            return body

        return add


def check(case):
    """Runs a kernel with a mistake, and checks the report."""
    body, error, words, x, out, settings, axes, located, kwargs = case
    with pytest.raises(error) as caught:
        if axes:
            mesh = make_mesh(**axes)
            kernel = plgpu.kernel(body, out_type=out_type(out), **kwargs)
            with emulate(**settings):
                np.asarray(sharded(kernel, mesh, P("x"), P("x"))(place(x, mesh, P("x"))))
        else:
            run_kernel(body, x, out_type=out_type(out), settings=settings, **kwargs)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert type(caught.value) is error or error is NotImplementedError
    assert not re.search(r"object at 0x|Effect|Var\(|Slot|Traceback", message)
    if issubclass(error, EmulationError):
        assert f"[kernel {body.__name__!r}; repeat with emulate(" in message
        assert not located or re.search(r"device \d(.|\n)*reports\.py:\d+", message), message
