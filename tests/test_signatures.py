"""What `help`, `inspect` and editors show for the public functions, and that it is true.

`make lint` checks the same types with pyright and mypy on tests/user_program.py.
"""

import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap import emulation
from overlap.collectives.gather import all_gather_lhs_matmul
from overlap.collectives.reduce import matmul_reduce_scatter
from tests.explained import answer
from tests.oracle import make_mesh

KEYWORDS = {
    overlap.matmul: {},
    overlap.all_gather_lhs_matmul: {},
    overlap.all_gather_rhs_matmul: {"dimension": 1},
    overlap.matmul_reduce_scatter: {},
    overlap.matmul_all_reduce: {},
}
TRANSPORTS = {
    overlap.all_gather_lhs_matmul: all_gather_lhs_matmul.TRANSPORTS,
    overlap.matmul_reduce_scatter: matmul_reduce_scatter.TRANSPORTS,
}
NAMES = {(op, "implementation"): ("fused", "xla") for op in KEYWORDS} | {
    (op, "transport"): tuple(transports) for op, transports in TRANSPORTS.items()
}
FUNCTIONS = [
    function
    for module in (overlap, emulation)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
]


def named(cases):
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in cases]


@pytest.mark.one_jax
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_parameter_and_result_has_a_type_that_can_be_looked_up(function):
    signature = inspect.signature(function, eval_str=True)
    assert signature.return_annotation not in (inspect.Signature.empty, typing.Any)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
        # Wrappers of the user's functions pass on arguments of any type; no other parameter may be untyped.
        passes_on = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert passes_on == (parameter.annotation is typing.Any), parameter


@pytest.mark.one_jax
@pytest.mark.parametrize(("op", "name"), named(NAMES))
def test_a_name_to_choose_is_a_literal_that_the_docstring_explains(op, name):
    literal, none = typing.get_args(typing.get_type_hints(op)[name])
    assert (typing.get_args(literal), none) == (NAMES[op, name], type(None))
    documented = op if name == "transport" else overlap.matmul  # It has the text of the keywords that all share.
    assert documented is op or "see `overlap.matmul`" in inspect.getdoc(op)
    explained = inspect.getdoc(documented).partition("Args:")[2].partition(f"\n  {name}: ")[2].partition("\n\n")[0]
    assert all(f'"{choice}"' in explained for choice in NAMES[op, name])


@pytest.mark.parametrize("wrong", ["zz", "XLA", "", b"xla", 3, True, ["xla"], ("xla",), np.zeros(3)], ids=repr)
@pytest.mark.parametrize(("op", "name"), named(NAMES))
def test_another_value_is_refused_by_name(op, name, wrong):
    lhs = rhs = np.zeros((8, 16) if op is overlap.all_gather_rhs_matmul else (8, 8), jnp.bfloat16)
    if op is overlap.all_gather_rhs_matmul:
        rhs = np.zeros((16, 8), jnp.bfloat16)
    axis, mesh = (() if op is overlap.matmul else ("x",)), make_mesh(x=2)
    call = lambda: op(lhs, rhs, *axis, **KEYWORDS[op], **{name: wrong})  # noqa: E731
    inside = jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    for refused in (
        lambda: jax.eval_shape(call if op is overlap.matmul else inside),
        lambda: answer(op, lhs, rhs, *axis, mesh=mesh, **KEYWORDS[op], **{name: wrong}),
    ):
        with pytest.raises(ValueError) as caught:
            refused()
        assert f"`{name}` must be None or one of {NAMES[op, name]}, got " in str(caught.value)


@pytest.mark.parametrize("name", ["implementation", "config"])
@pytest.mark.parametrize("wrong", ["zz", 3, np.zeros(3)], ids=repr)
def test_matmul_refuses_it_too_where_only_xla_can_run(name, wrong):
    """With k sharded the kernel is excluded early; the argument must be checked even so."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    lhs = jax.device_put(jnp.ones((8, 16), jnp.bfloat16), NamedSharding(mesh, P(None, "x")))
    rhs = jax.device_put(jnp.ones((16, 8), jnp.bfloat16), NamedSharding(mesh, P()))
    for refused in (overlap.matmul, functools.partial(overlap.explain, overlap.matmul)):
        with pytest.raises(ValueError, match=f"`{name}` must be None or "):
            refused(lhs, rhs, **{name: wrong})


@pytest.mark.one_jax
def test_the_forms_of_a_call_have_the_keywords_of_the_function():
    """Overloads for each kind of `rhs`, `return_gathered` and `activation`; type checkers see no other keywords."""
    own = inspect.signature(all_gather_lhs_matmul.all_gather_lhs_matmul).parameters
    forms = typing.get_overloads(all_gather_lhs_matmul.all_gather_lhs_matmul)
    assert len(forms) == 4
    for form in forms:
        *first, last = inspect.signature(form).parameters.values()
        is_of_each = "activation" not in {parameter.name for parameter in first}
        shared = (all_gather_lhs_matmul._OfEach if is_of_each else all_gather_lhs_matmul._Keywords).__annotations__
        assert {*(parameter.name for parameter in first), *shared} == own.keys()
        assert last.kind is last.VAR_KEYWORD
        for name in shared.keys() - {"activation"}:
            assert shared[name].__forward_arg__ == own[name].annotation
