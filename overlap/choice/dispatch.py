"""Decides which implementation runs, the fused kernel or XLA, and says why."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh, Mesh

from overlap.choice.choose import choose_config, is_collecting, settled, verdict
from overlap.choice.crossover import NOTHING_MEASURED, Cause, Verdict
from overlap.choice.problem import Problem
from overlap.choice.rates import rates_of
from overlap.choice.space import candidates
from overlap.kernels.config import Config
from overlap.kernels.target import Target, current_target

Implementation = Literal["fused", "xla"]
IMPLEMENTATIONS = get_args(Implementation)
logger = logging.getLogger("overlap")
_logged: set[tuple[Problem | None, Explanation]] = set()
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
# For these causes users of this library, who expect the fused kernel, are warned that XLA runs.
_MISSED = (Cause.NOT_SERVED, Cause.NOT_BY_DEFAULT, Cause.NOT_MEASURED)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` says of one call: which implementation it would run, and why.

    Attributes:
      op: the operation's name.
      shapes: the sizes m x n x k of a device's operands, and their dtype.
      implementation: "fused" or "xla".
      config: the fused kernel's configuration, None for "xla".
      reason: one sentence.
      cause: what decided, for programs.
      target: the device that the decision is for.
      source: where the configuration comes from: "given", a table, or the heuristic.
      transport: how data travels in a fused collective: "pull", "push" or "ring"; empty if the call is not fused, or if
        the operation has one transport only.
      transport_reason: why this transport.
      ctas_at_once: how many CTAs of a device must run at the same time so that the fused kernel can finish; 0 for
        "xla". `all_gather_lhs_matmul` by "ring" needs all its CTAs. It can deadlock with another kernel that occupies
        an SM while it waits for another device, as XLA's collectives do.
      scratch_bytes: memory of a device that the fused kernel needs for the parts of results that are exchanged; 0 for
        "xla". The copies of shards that an all-gather makes are not counted.
      plan: for a product of global arrays, what runs along which mesh axes; in a backward pass, what is computed;
        of experts, whether tokens arrive meanwhile.
      ratio: XLA's time over the fused kernel's, measured or expected; 1 where nothing is known, or was compared.
    """

    op: str
    implementation: Implementation
    config: Config | None
    reason: str
    cause: Cause
    target: Target
    source: str = ""
    transport: str = ""
    transport_reason: str = ""
    ctas_at_once: int = 0
    scratch_bytes: int = 0
    plan: str = ""
    shapes: str = ""
    ratio: float = 1.0

    @property
    def why(self) -> str:
        """The reason, and what a fused kernel needs."""
        words = [self.reason]
        if self.transport:
            words.append(f"transport {self.transport}: {self.transport_reason}")
        if self.ctas_at_once > 1:
            words.append(f"needs {self.ctas_at_once} CTAs at the same time")
        if self.scratch_bytes:
            words.append(f"scratch: {self.scratch_bytes:,} bytes")
        return "; ".join(words)

    def __str__(self) -> str:
        config = f" with {self.config} ({self.source})" if self.config else ""
        plan = f"{self.plan}: " if self.plan else ""
        return f"{plan}{self.op}: {self.implementation}{config}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the caller asks for.

    Attributes:
      config: the fused kernel's configuration; None to look it up (`choose_config`).
      implementation: "fused" or "xla"; None to choose here.
    """

    config: Config | None = None
    implementation: str | None = None


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """Facts about a call that the choice depends on besides the sizes, and the memory that the fused kernel would need.

    Attributes:
      transport: how data would travel in the fused kernel; empty if none travels, or there is one transport only.
      transport_reason: why this transport.
      needs_all_ctas: whether all CTAs of the fused kernel must run at the same time. If not, only CTAs that share a
        tile must.
      why_not_by_default: why the fused kernel must not be chosen by default, though the caller may ask for it; None if
        it may be chosen.
      scratch_bytes: scratch_bytes(config, target) is the memory that the fused kernel needs beside operands and
        results.
    """

    transport: str = ""
    transport_reason: str = ""
    needs_all_ctas: bool = False
    why_not_by_default: str | None = None
    scratch_bytes: Callable[[Config, Target], int] = lambda config, target: 0


def target(mesh: Mesh | AbstractMesh | None = None) -> Target:
    """Returns the device that the code being traced will run on; with `mesh`, the device of that mesh."""
    return current_target(mesh)


class Chosen(NamedTuple):
    """A configuration of the fused kernel, where it comes from, and why the kernel refuses it; None if it does not."""

    config: Config
    source: str
    refusal: ValueError | NotImplementedError | None


def checked(config: Config, source: str, device: Target, check: Callable[[Config, Target], None]) -> Chosen:
    """Returns a configuration with what `check` raises for it."""
    try:
        check(config, device)
    except (ValueError, NotImplementedError) as refusal:
        return Chosen(config, source, refusal)
    return Chosen(config, source, None)


def first_that_fits(
    config: Config, source: str, problem: Problem, device: Target, check: Callable[[Config, Target], None]
) -> Chosen:
    """Returns `config` if it does not contradict the call, else the best candidate that does not.

    `check` may refuse a configuration that was chosen for the `Problem`, since a `Problem` does not describe all of a
    call. After NotImplementedError no candidate is tried, since it would not help. If all contradict the call, `config`
    is returned.
    """
    chosen = checked(config, source, device, check)
    if not isinstance(chosen.refusal, ValueError):
        return chosen
    others = (checked(other, "heuristic", device, check) for other in candidates(problem, device))
    return next((other for other in others if not isinstance(other.refusal, ValueError)), chosen)


def decide(
    op: str,
    asked: Asked,
    device: Target,
    check: Callable[[Config, Target], None],
    problem: Problem,
    circumstances: Circumstances = Circumstances(),
) -> Explanation:
    """Chooses between the fused kernel and XLA.

    Args:
      op: the operation's name, for messages.
      asked: what the caller asks for.
      device: the device that the call is for.
      check: check(config, target) raises NotImplementedError if the fused kernel cannot serve the call, and ValueError
        if the call is wrong.
      problem: the call's operation and sizes. Each decision is logged once per problem.
      circumstances: what the choice depends on besides the sizes.

    Raises:
      ValueError: whatever `check` raises.
      NotImplementedError: `implementation="fused"` and the fused kernel cannot serve the call.
    """
    implementation = asked.implementation
    given = None if asked.config is None else checked(asked.config, "given", device, check)
    if given is not None and isinstance(given.refusal, ValueError):
        raise given.refusal
    if implementation == "xla":
        return Explanation(op, "xla", None, "asked for", Cause.ASKED_FOR, device)
    config, source, refusal = given or first_that_fits(*choose_config(problem, device), problem, device, check)

    def fused(reason: str, cause: Cause) -> Explanation:
        at_once = device.num_cores if circumstances.needs_all_ctas else config.cluster * config.stream_k
        scratch = circumstances.scratch_bytes(config, device)
        return Explanation(
            op=op, implementation="fused", config=config, reason=reason, cause=cause, target=device, source=source,
            transport=circumstances.transport, transport_reason=circumstances.transport_reason, ctas_at_once=at_once,
            scratch_bytes=scratch,
        )  # fmt: skip

    if implementation == "fused":
        if refusal is not None:
            raise refusal
        if device.platform == "cpu" and jax.process_count() > 1:
            raise NotImplementedError(
                f"the emulator runs all devices in one process, and there are {jax.process_count()}: start one "
                'process, or use implementation="xla"'
            )
        return fused("asked for", Cause.ASKED_FOR)
    if device.platform == "cpu" and not is_collecting() and settled(problem) is None:
        found = Verdict(True, Cause.EMULATED.value, Cause.EMULATED)
    elif isinstance(refusal, ValueError):
        raise refusal
    elif refusal is not None:
        found = Verdict(True, str(refusal), Cause.NOT_SERVED)
    elif given is not None:
        found = Verdict(False, "the fused kernel serves this problem", Cause.ASKED_FOR)
    elif circumstances.why_not_by_default:
        found = Verdict(True, circumstances.why_not_by_default, Cause.NOT_BY_DEFAULT)
    elif is_collecting():  # The session measures XLA itself.
        found = Verdict(False, "the fused kernel serves this problem", Cause.ASKED_FOR)
    else:
        found = verdict(problem, device)
    by_xla = Explanation(op, "xla", None, found.reason, found.cause, device)
    choice = by_xla if found.xla_runs else fused(found.reason, found.cause)
    choice = dataclasses.replace(choice, ratio=found.ratio)
    log(choice, problem)
    return choice


def leave_to_xla(op: str, implementation: str | None, device: Target, reason: str) -> Explanation:
    """Returns the decision about a call for which no kernel can be built, whatever its configuration; `reason`: why.

    Raises:
      NotImplementedError: `implementation="fused"`.
    """
    if implementation == "fused":
        raise NotImplementedError(f'{reason}, or use implementation="xla"')
    if implementation == "xla":
        return Explanation(op, "xla", None, "asked for", Cause.ASKED_FOR, device)
    choice = Explanation(op, "xla", None, reason, Cause.NOT_SERVED, device)
    log(choice)
    return choice


def decide_unmodeled(
    op: str,
    implementation: str | None,
    device: Target,
    cannot: str,
    why_not_by_default: str | None,
    why: str = "XLA also moves the rows that are not in use",
) -> Explanation:
    """As `decide`, for kernels of whose times there is no model: they run wherever they can on a measured GPU.

    `cannot` says why the kernels cannot serve the call; empty if they can. `why`: the reason for the kernels.
    """

    def by_xla(reason: str, cause: Cause) -> Explanation:
        return Explanation(op, "xla", None, reason, cause, device)

    if implementation == "xla":
        return by_xla("asked for", Cause.ASKED_FOR)
    if implementation == "fused":
        if cannot:
            raise NotImplementedError(f'{cannot}, or use implementation="xla"')
        return Explanation(op, "fused", None, "asked for", Cause.ASKED_FOR, device)
    if device.platform == "cpu" and not is_collecting():
        return by_xla(Cause.EMULATED.value, Cause.EMULATED)
    if cannot:
        choice = by_xla(cannot, Cause.NOT_SERVED)
        log(choice)
        return choice
    if not is_collecting() and why_not_by_default:
        return by_xla(why_not_by_default, Cause.NOT_BY_DEFAULT)
    if not is_collecting() and not rates_of(device).measured:
        return by_xla(NOTHING_MEASURED.reason, NOTHING_MEASURED.cause)
    return Explanation(op, "fused", None, why, Cause.PREDICTED, device)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Logs no decision inside the block: those about a call of which another decision is said."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def log(choice: Explanation, problem: Problem | None = None) -> None:
    """Logs a decision, once for each problem."""
    if (problem, choice) in _logged or is_collecting() or _quiet.get():
        return
    _logged.add((problem, choice))
    is_served = choice.target.platform == "gpu" and (choice.target.is_hopper or choice.target.is_blackwell)
    logger.log(logging.WARNING if is_served and choice.cause in _MISSED else logging.INFO, "%s", choice)
