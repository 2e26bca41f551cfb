"""How a module of jax is changed: once per process, explicitly, and only with a version on which it was checked.

The range of checked versions is the library's own: `JAX_FROM` and `JAX_BELOW` in `overlap/_requirements.py`, which
pyproject.toml repeats for pip. CI tests every patch on `TESTED_JAX`, the first and the last version of the range. With
a version outside the range, `apply` raises: nobody has checked that the code to be changed is still the same. With such
a version, everything that needs no patch works: `implementation="xla"`, kernels that are emulated on a CPU, and fused
kernels without patches.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

from overlap import _requirements, _settings

CHECKED = f">={'.'.join(map(str, _requirements.JAX_FROM))},<{'.'.join(map(str, _requirements.JAX_BELOW))}"


@dataclasses.dataclass(frozen=True)
class Patch:
    """A change of jax's modules.

    Attributes:
      name: what the change makes possible, for messages.
      change: makes the change. It looks up all private names before it replaces the first one. It does nothing if
        another copy of this library has made the change already.
      needs: the patches that must be applied before this one.
    """

    name: str
    change: Callable[[], None]
    needs: tuple[Patch, ...] = ()


_applied: set[Patch] = set()
_lock = threading.RLock()


def apply(*patches: Patch) -> None:
    """Applies `patches`, each at most once per process, and before each one the patches that it needs.

    Raises:
      RuntimeError: the installed jax is not among the checked versions, or has no name that a patch changes.
    """
    with _lock:
        for patch in patches:
            if patch in _applied:
                continue
            apply(*patch.needs)
            _require_checked(patch)
            patch.change()
            _applied.add(patch)


def _require_checked(patch: Patch) -> None:
    import jax

    if _requirements.why_not_jax(jax.__version__) and not _settings.unchecked_jax():
        raise RuntimeError(
            f"a fused kernel needs a change in jax ({patch.name}) that was checked with jax {CHECKED}, and jax "
            f"{jax.__version__} is installed: install a checked version (pip install 'jax{CHECKED}'), use "
            f'implementation="xla", or set {_settings.UNCHECKED_JAX_VARIABLE}=1 to try the change all the same'
        )


def private(module: str, path: str) -> Any:
    """Returns the object that has a private name in jax.

    Args:
      module: the module's full name.
      path: the name within the module, such as "LaunchContext.device_id".

    Raises:
      RuntimeError: the installed jax has no such name.
    """
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        import jax

        raise RuntimeError(
            f"overlap uses the private name {module}.{path}, and jax {jax.__version__} has not got it: install a "
            f"version with which overlap was checked (pip install 'jax{CHECKED}'), or, if a fused kernel needs it, "
            'use implementation="xla"'
        ) from error


def replace(module: str, path: str, mark: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces a function of jax by `make(function)`, unless a function with this mark stands there already.

    Args:
      module: the module's full name.
      path: the function's name within the module; it may be a method.
      mark: the name of an attribute that the new function gets. By this attribute another copy of this library in the
        same process (`benchmarks/before_after.py` loads one) sees that the change is made.
      make: takes jax's function and returns the new one.
    """
    owner, _, name = path.rpartition(".")
    given = private(module, path)
    if not getattr(given, mark, False):
        setattr(private(module, owner) if owner else importlib.import_module(module), name, marked(given, mark, make))


def marked(given: Any, mark: str, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """Returns `make(given)` with the name, the docstring and the attributes of `given`, and the attribute `mark`."""
    made: Any = functools.wraps(given)(make(given))
    setattr(made, mark, True)
    return made
