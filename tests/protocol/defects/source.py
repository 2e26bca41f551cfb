"""Makes defects from the source of the library's kernels, and injects them into the functions that are loaded."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import pathlib
import re
import types
from collections.abc import Iterator

FOLDERS = ("collectives", "kernels", "primitives", "single_gpu")
# Modules of these names check arguments, choose sizes or write reports. Other tests are about them.
_NOT_OF_KERNELS = re.compile(
    r"(backward|kernel|(grouped_)?kernels|operations|config|limits|target|marks|stalls|arguments|host_mesh"
    r"|architectures|(grouped_)?matmul|experts|routing|rows|linear_cross_entropy|statistics)$"
)
# Calls that only check arguments, or only help to report: without them a correct call runs as before.
_CHECKS = re.compile(r"^(_?require|_?check|_?refuse|warn|mark|now$)")
# To wait or to fence once more changes nothing.
_IDEMPOTENT = re.compile(r"wait|fence|commit|look")
# A lambda that does one of these is a whole step of the protocol.
_SAYS_OR_WAITS = re.compile(r"signal|wait")
# Arguments that say what is ordered or counted.
_BOOLEANS = ("orders_tensor_core", "at_least", "decrement", "wait_read_only", "accumulate", "last", "of_part", "whole")
# Functions that only say how much memory or how many flags a kernel has: more than needed does no harm.
_OF_SIZES = re.compile(r"(^|\.)(launch|of|scratch_\w+)$|_(shape|shapes|type|types|bytes)$")
# What a weaker fence, atomic or load says in PTX, and the scope within which it holds.
_WEAKER = {".acq_rel": ".relaxed", ".release": ".relaxed", ".acquire": ".relaxed", ".sys": ".gpu"}
_WEAKER_CALL = {"wait_stores_landed": "wait_stores_read"}
# Conditions that hold or do not for all of a call: the other branch lacks what it needs.
_ABSENT = re.compile(r"\bNone\b|\bisinstance\b|_KNOWN")
_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Defect:
    """One change of one function.

    Attributes:
      module: below `overlap`, such as "kernels.tma.store".
      function: the name of the function, or of the class and the method.
      kind: what is changed, such as "drop".
      code: the code that is changed, on one line.
      number: counts equal changes of equal code in the function.
    """

    module: str
    function: str
    kind: str
    code: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.kind} {self.code}" + (f" #{self.number}" if self.number else "")


@dataclasses.dataclass(frozen=True)
class _Change:
    """The change of a node: `of` returns its replacement, None to leave it out."""

    kind: str
    of: collections.abc.Callable[[ast.AST], ast.AST | list[ast.AST] | None]


def _parsed(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body


def _plus(amount: int) -> collections.abc.Callable[[ast.AST], ast.AST]:
    operator = ast.Add() if amount > 0 else ast.Sub()
    return lambda node: ast.BinOp(node, operator, ast.Constant(abs(amount)))  # type: ignore[arg-type]


def _called(node: ast.AST) -> str:
    """Returns the last name of the function that a call calls."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _changes(node: ast.AST, parent: ast.AST) -> Iterator[_Change]:
    """Returns the changes that make a defect of a node."""
    match node:
        case ast.Expr(value=ast.Call() as call) if not _CHECKS.match(_called(call)):
            yield _Change("drop", lambda _: ast.Pass())
            if not _IDEMPOTENT.search(_called(call)):
                yield _Change("repeat", lambda node: [node, node])
        case ast.FunctionDef(decorator_list=[ast.Call() as decorator]) if _called(decorator) == "when":
            yield _Change("drop", lambda _: ast.Pass())
            yield _Change("always", lambda node: _with_decorator(node, "lambda act: act()"))
        case ast.Call() if _called(node) == "when":
            yield _Change("always", lambda _: _parsed("lambda act: act()"))
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()) if not isinstance(
            parent, (ast.BinOp, ast.Compare)
        ):
            yield _Change("one more than", _plus(1))
            yield _Change("one less than", _plus(-1))
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER:
            yield _Change("other side of", _compared_otherwise)
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and isinstance(
            parent, (ast.Call, ast.keyword)
        ):
            yield _Change("one more than", _plus(1))
        case ast.Constant(value=str(value)):
            for strong, weak in _WEAKER.items():
                if strong in value:
                    yield _Change(f"{weak} for {strong} in", lambda _, s=strong, w=weak: _replaced(value, s, w))
            if value.startswith("fence"):
                yield _Change("drop", lambda _: ast.Constant(""))
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _WEAKER_CALL:
            yield _Change("weaken", lambda _: ast.Name(_WEAKER_CALL[name], ast.Load()))
        case ast.Subscript(value=ast.Attribute(attr="at"), slice=index):
            for place, part in enumerate(index.elts if isinstance(index, ast.Tuple) else [index]):
                if not isinstance(part, (ast.Slice, ast.Constant)) and not _begins_at_a_constant(part):
                    yield _Change("first place in", functools.partial(_at_the_first, place))
        case ast.IfExp(test=test) if not _ABSENT.search(ast.unparse(test)):
            yield _Change("exchange in", lambda _: ast.IfExp(test, node.orelse, node.body))
        case ast.Lambda(body=ast.Call() as call) if _SAYS_OR_WAITS.search(_called(call)):
            yield _Change("drop in", lambda _: ast.Lambda(node.args, ast.Constant(None)))
        case ast.keyword(arg=name, value=ast.Constant(value=bool(value))) if name in _BOOLEANS:
            yield _Change("not in", lambda _: ast.keyword(name, ast.Constant(not value)))
        case ast.BinOp(left, ast.BitAnd(), right):
            yield _Change("left alone of", lambda _: left)
            yield _Change("right alone of", lambda _: right)


def _begins_at_a_constant(index: ast.AST) -> bool:
    return isinstance(index, ast.Call) and _called(index) == "ds" and isinstance(index.args[0], ast.Constant)


def _at_the_first(place: int, node: ast.AST) -> ast.AST:
    """Returns the subscript with zero for one of its indices."""
    assert isinstance(node, ast.Subscript)
    parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    match parts[place]:
        case ast.Call(func, [start, *rest]) as call if _called(call) == "ds":
            parts[place] = ast.Call(func, [_zero(start), *rest], [])
        case ast.Starred(value):
            parts[place] = ast.Starred(_zero(value), ast.Load())
        case index:
            parts[place] = _zero(index)
    return ast.Subscript(node.value, ast.Tuple(parts, ast.Load()) if len(parts) > 1 else parts[0], node.ctx)


def _zero(index: ast.expr) -> ast.expr:
    zero = _parsed("lambda index: tuple(0 * i for i in index) if isinstance(index, tuple) else 0 * index")
    return ast.Call(zero, [index], [])


def _replaced(text: str, strong: str, weak: str) -> ast.Constant:
    return ast.Constant(text.replace(strong, weak))


def _compared_otherwise(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    return ast.Compare(node.left, [_OTHER[type(node.ops[0])]()], node.comparators)


def _with_decorator(node: ast.AST, code: str) -> ast.AST:
    assert isinstance(node, ast.FunctionDef)
    return ast.FunctionDef(**{**{f: getattr(node, f) for f in node._fields}, "decorator_list": [_parsed(code)]})


# --- Where changes are made -------------------------------------------------------------------------------------------


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Returns the functions of a module and the methods of its classes, each with its name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _below(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Returns what a kernel's code consists of: each node below `node` that runs, with its parent."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "args") and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr)) or _is_docstring(child):
                continue
            if isinstance(child, ast.AST):
                yield child, node
                yield from _below(child)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _sites(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, _Change]]:
    refusals = {id(node.test) for node in ast.walk(function) if isinstance(node, ast.If) and _refuses(node)}
    for node, parent in _below(function):
        if id(node) not in refusals and id(parent) not in refusals:
            for change in _changes(node, parent):
                yield node, change


def _refuses(node: ast.If) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in node.body)


def _numbered(module: str, tree: ast.Module) -> Iterator[tuple[Defect, ast.AST, _Change]]:
    for name, function in _functions(tree):
        if _OF_SIZES.search(name):
            continue
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        for node, change in _sites(function):
            code = " ".join(ast.unparse(node).split())
            yield Defect(module, name, change.kind, code, seen[change.kind, code]), node, change
            seen[change.kind, code] += 1


@functools.cache
def file_of(module: str) -> pathlib.Path:
    spec = importlib.util.find_spec(f"overlap.{module}")
    assert spec is not None and spec.origin is not None
    return pathlib.Path(spec.origin)


def modules() -> list[str]:
    """Returns the modules below `overlap` whose code becomes code of kernels, but for the lessons."""
    root = file_of("kernels").parent.parent
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    names = (file.relative_to(root).with_suffix("").parts for file in files if file.name != "__init__.py")
    return [".".join(parts) for parts in names if not _NOT_OF_KERNELS.match(parts[-1])]


def of_module(module: str) -> dict[Defect, range]:
    """Returns all defects that can be made of a module below `overlap`, and the lines of the code of each."""
    numbered = _numbered(module, ast.parse(file_of(module).read_text()))
    return {defect: range(node.lineno, (node.end_lineno or node.lineno) + 1) for defect, node, _ in numbered}


# --- Injection --------------------------------------------------------------------------------------------------------


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, change: _Change):
        self._target, self._change = target, change

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST] | None:
        if node is not self._target:
            return self.generic_visit(node)
        replacement = self._change.of(node)
        for new in replacement if isinstance(replacement, list) else [replacement]:
            if new is not None and new is not node:
                ast.copy_location(new, node)
        return replacement


def _code_of(defect: Defect) -> types.CodeType:
    """Compiles the module with the defect, and returns the code of the function that has it."""
    tree = ast.parse(file_of(defect.module).read_text())
    function = dict(_functions(tree))[defect.function]
    node, change = next((node, change) for other, node, change in _numbered(defect.module, tree) if other == defect)
    _Replace(node, change).visit(tree)
    return _compiled(ast.fix_missing_locations(tree), defect.module, function)


def _rewritten(module: str, name: str, replacements: list[tuple[str, str]]) -> types.CodeType:
    """Compiles the module with other text in one function, and returns the function's code."""
    lines = file_of(module).read_text().splitlines(keepends=True)
    function = dict(_functions(ast.parse("".join(lines))))[name]
    first, end = _first_line(function) - 1, function.end_lineno
    text = "".join(lines[first:end])
    for old, new in replacements:
        assert old in text, f"{module}.{name} has no text {old!r} any more: write steps.csv anew"
        text = text.replace(old, new)
    return _compiled("".join([*lines[:first], text, *lines[end:]]), module, function)


def _first_line(function: ast.FunctionDef) -> int:
    return min(part.lineno for part in [function, *function.decorator_list])


def _compiled(source: str | ast.Module, module: str, function: ast.FunctionDef) -> types.CodeType:
    codes = _all_codes(compile(source, file_of(module), "exec", dont_inherit=True))  # type: ignore[arg-type]
    of_function = function.name, _first_line(function)
    return next(code for code in codes if (code.co_name, code.co_firstlineno) == of_function)


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner
            yield from _all_codes(inner)


@functools.cache
def _loaded(module: str) -> dict[tuple[str, int], list[types.FunctionType]]:
    """Returns the functions of a module that are loaded, behind any decorators, by their names and lines."""
    importlib.import_module(f"overlap.{module}")
    file, found = str(file_of(module)), collections.defaultdict(list)
    for x in gc.get_objects():
        if isinstance(x, types.FunctionType) and x.__code__.co_filename == file:
            found[x.__code__.co_name, x.__code__.co_firstlineno].append(x)
    return found


def injected(defect: Defect) -> contextlib.AbstractContextManager[None]:
    """Runs the `with` block with the defect in the library: kernels that are traced in it have the defect."""
    return _exchanged([(defect.module, _code_of(defect))])


def rewritten(*changes: tuple[str, str, str]) -> contextlib.AbstractContextManager[None]:
    """Runs the `with` block with other text in functions of the library: (function below `overlap`, old, new) each."""
    of_functions: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path, old, new in changes:
        of_functions.setdefault(_split(path), []).append((old, new))
    return _exchanged([(place[0], _rewritten(*place, texts)) for place, texts in of_functions.items()])


def _split(path: str) -> tuple[str, str]:
    """Splits "primitives.handshake.Handshake.leave" into the module and the function in it."""
    module, _, name = path.rpartition(".")
    while not _path_of(module).exists():
        module, _, of = module.rpartition(".")
        name = f"{of}.{name}"
    return module, name


def _path_of(module: str) -> pathlib.Path:
    return (file_of("kernels").parent.parent / module.replace(".", "/")).with_suffix(".py")


@contextlib.contextmanager
def _exchanged(codes: list[tuple[str, types.CodeType]]) -> Iterator[None]:
    from overlap.frame.primitive import tracer_of

    before = []
    try:
        for module, code in codes:
            functions = _loaded(module)[code.co_name, code.co_firstlineno]
            assert functions, f"{code.co_name} of {module} is not loaded"
            for function in functions:
                before.append((function, function.__code__))
                function.__code__ = code
        tracer_of.cache_clear()
        yield
    finally:
        for function, kept in before:
            function.__code__ = kept
        tracer_of.cache_clear()
