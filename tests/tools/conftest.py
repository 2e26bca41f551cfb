"""The commands ask jax for the devices that they need only if it has not started: here it has, with eight."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert len(jax.devices()) == 8
