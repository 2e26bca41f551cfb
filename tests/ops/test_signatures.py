"""What `help`, `inspect` and editors show for the public functions, and that it is true.

`make lint` checks the same types with pyright and mypy on tests/docs/user_program.py.
"""

import inspect
import typing

import pytest

import overlap
from overlap import emulation
from overlap.collectives.gather import all_gather_lhs_matmul
from overlap.kernels.operations import BY_NAME
from overlap.kernels.operations import OPERATIONS as TABLE

# In an order that is the same in all processes.
OPERATIONS = list(dict.fromkeys(getattr(overlap, spec.function) for spec in BY_NAME.values()))
TRANSPORTS = {
    overlap.all_gather_lhs_matmul: BY_NAME["all_gather_lhs_matmul"].transports,
    overlap.matmul_reduce_scatter: BY_NAME["matmul_reduce_scatter"].transports,
}
NAMES = {(op, "implementation"): ("fused", "xla") for op in OPERATIONS} | {
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
def test_every_public_product_is_an_entry_of_the_table():
    others = {"Config", "Explanation", "Routing", "autotune", "emulation", "explain", "initialize", "route"}
    of_global_arrays = {"sharded_matmul"}  # It runs the operations of the table.
    losses = {spec.function for spec in TABLE if spec.is_loss}
    assert set(overlap.__all__) - others - of_global_arrays == {op.__name__ for op in OPERATIONS} | losses


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
    # One function has the text of the keywords that all share; of grouped products another one.
    of_all = overlap.grouped_matmul if "grouped" in op.__name__ else overlap.matmul
    documented = op if name == "transport" else of_all
    assert documented is op or f"see `overlap.{of_all.__name__}`" in inspect.getdoc(op)
    explained = inspect.getdoc(documented).partition("Args:")[2].partition(f"\n  {name}: ")[2].partition("\n\n")[0]
    assert all(f'"{choice}"' in explained for choice in NAMES[op, name])


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
