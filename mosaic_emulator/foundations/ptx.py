"""Parses inline PTX into instructions with their operands, guards, labels and registers. `ptx_meaning` runs them.

The PTX comes as a template of LLVM's, in which `$0`, `$1`, … stand for the operands, results first. As with `ptxas`, it
is an error to use a register that no `.reg` declares or a label that is not set, or to write a line that is no
instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import re

_SPECIAL = re.compile(r"%[a-z_]\w*(?:\.[xyz])?\Z")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\Z")
_NAME = r"[A-Za-z_$%][\w$]*"
_STATEMENT = re.compile(r"\s*(?:([{}])|(" + _NAME + r")\s*:(?!:)|([^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);)")


class PtxError(ValueError):
    """PTX that cannot be parsed. The message quotes the line."""


@dataclasses.dataclass(frozen=True)
class Register:
    """A register that the PTX declares, or an operand of the template (`$0`). The name is unique in the PTX."""

    name: str


@dataclasses.dataclass(frozen=True)
class Special:
    """A register of the hardware, such as ``%laneid``."""

    name: str


@dataclasses.dataclass(frozen=True)
class Address:
    """An address operand, `[base + offset]`; the offset is in bytes."""

    base: Register
    offset: int


@dataclasses.dataclass(frozen=True)
class Not:
    """A predicate operand that is negated: `!p`."""

    register: Register


# A number is an immediate operand; None is the operand `_`, which drops a result.
Operand = Register | Special | Address | Not | int | None


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: the first word of the opcode, such as ``ld``.
        modifiers: the other words of the opcode, such as ``relaxed``.
        operands: the operands, in the order of the PTX.
        guard: the predicate under which the instruction runs; None if it always runs.
        negated: whether the instruction runs if the guard does not hold, instead of if it holds.
        target: the index of the instruction to which a branch jumps; None for other instructions.
        text: the instruction as it was written.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    target: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Parsed PTX: the instructions, and the types of the declared registers by name."""

    instructions: tuple[Instruction, ...]
    registers: dict[str, str]


class _Scope:
    """The registers and labels that are declared between two braces."""

    def __init__(self, number: int, outer: _Scope | None):
        self.number, self.outer = number, outer
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}

    def find(self, what: str, name: str) -> tuple[_Scope, object] | None:
        names = getattr(self, what)
        if name in names:
            return self, names[name]
        return None if self.outer is None else self.outer.find(what, name)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Code:
    """Parses inline PTX.

    Raises:
        PtxError: `text` is not PTX, or is PTX that this module cannot parse.
    """
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).replace("$$", "$")
    scope = outermost = _Scope(0, None)
    scopes, lines = 1, []
    at = 0
    while plain[at:].strip():
        found = _STATEMENT.match(plain, at)
        if found is None:
            raise PtxError(f"cannot read {' '.join(plain[at:].split())[:80]!r}: a `;` is missing")
        at = found.end()
        brace, label, statement = found.groups()
        if brace == "{":
            scope, scopes = _Scope(scopes, scope), scopes + 1
        elif brace == "}":
            if scope.outer is None:
                raise PtxError("a closing brace has no opening one")
            scope = scope.outer
        elif label is not None:
            if label in scope.labels:
                raise PtxError(f"the label {label} stands twice")
            scope.labels[label] = len(lines)
        elif statement.split()[:1] == [".reg"]:
            _declare(scope, " ".join(statement.split()))
        elif statement.strip():
            lines.append((" ".join(statement.split()), scope))
    if scope is not outermost:
        raise PtxError("an opening brace has no closing one")
    registers: dict[str, str] = {}
    return Code(tuple(_instruction(line, scope, registers) for line, scope in lines), registers)


def _declare(scope: _Scope, statement: str) -> None:
    found = re.fullmatch(r"\.reg \.(\w+) (.*)", statement)
    if found is None:
        raise PtxError(f"cannot read {statement!r}")
    kind, names = found.groups()
    for name in re.split(r"\s*,\s*", names.strip()):
        ranged = re.fullmatch(rf"({_NAME})<(\d+)>", name)
        if ranged is None and not re.fullmatch(_NAME, name):
            raise PtxError(f"cannot read {statement!r}")
        for each in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
            if each in scope.registers:
                raise PtxError(f"the register {each} is declared twice")
            scope.registers[each] = kind


def _instruction(line: str, scope: _Scope, registers: dict[str, str]) -> Instruction:
    found = re.fullmatch(rf"(?:@(!?)\s*({_NAME}|\${{?\d+}}?)\s+)?([a-z]\w*)((?:\.[\w:]+)*)(?:\s+(.*))?", line)
    if found is None:
        raise PtxError(f"cannot read {line!r}")
    negated, guard, name, modifiers, rest = found.groups()
    guarded = None if guard is None else _register(guard, line, scope, registers)
    words = tuple(modifiers.split(".")[1:])
    if name == "bra":
        label = scope.find("labels", (rest or "").strip())
        if label is None:
            raise PtxError(f"no label for {line!r}")
        target = label[1]
        assert isinstance(target, int)
        return Instruction(name, words, (), guarded, bool(negated), target, line)
    # A comparison may have two results, `p|q`.
    texts = [part.strip() for part in re.split(r"[,|]", rest)] if rest else []
    operands = tuple(_operand(part, line, scope, registers) for part in texts)
    return Instruction(name, words, operands, guarded, bool(negated), None, line)


def _operand(text: str, line: str, scope: _Scope, registers: dict[str, str]) -> Operand:
    if text == "_":
        return None
    if _NUMBER.match(text):
        digits = text.removesuffix("U")
        octal = re.fullmatch(r"(-?)0(\d+)", digits)
        return int(octal[1] + octal[2], 8) if octal else int(digits, 0)
    if text.startswith("!"):
        return Not(_register(text[1:].strip(), line, scope, registers))
    address = re.fullmatch(r"\[\s*([^\s+\-\]]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", text)
    if address is not None:
        base, sign, offset = address.groups()
        distance = int(offset, 0) if offset else 0
        return Address(_register(base, line, scope, registers), -distance if sign == "-" else distance)
    if scope.find("registers", text) is None and _SPECIAL.match(text):
        return Special(text)
    return _register(text, line, scope, registers)


def _register(text: str, line: str, scope: _Scope, registers: dict[str, str]) -> Register:
    operand = re.fullmatch(r"\$\{?(\d+)\}?", text)
    if operand is not None:
        return Register(f"${operand[1]}")
    found = scope.find("registers", text)
    if found is None:
        raise PtxError(f"{text!r} in {line!r} is no register that is declared there")
    where, kind = found
    name = f"{text}'{where.number}"
    registers[name] = str(kind)
    return Register(name)
