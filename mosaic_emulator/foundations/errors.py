"""The exceptions for faults of a kernel that the emulator finds."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """A fault of an emulated kernel. The message names device, CTA, thread, memory and source line."""


def cannot_run(reason: BaseException) -> EmulationError:
    """Makes the error that tells a user of an exception that is none of the faults below."""
    if isinstance(reason, NotImplementedError):
        return EmulationError(f"the emulator cannot run this: {reason}")
    return EmulationError(
        f"the emulator failed, which is most likely a mistake of its own: {type(reason).__name__}: {reason}"
    )


class RaceError(EmulationError):
    """Nothing orders two accesses to the same memory, of which at least one is a write.

    Attributes:
        kind: ``"data"``: no chain of signals and waits orders the two accesses. ``"proxy"``: a chain orders them, but
            the later access goes through the asynchronous proxy (TMA, wgmma) and the chain has no proxy fence.
            ``"tensor"``: a chain orders them, but not for tensor memory, because a barrier of the chain lacks
            ``orders_tensor_core``. ``"exit"``: a device may end its kernel while a peer still uses its memory.
    """

    def __init__(self, message: str, kind: str = "data"):
        super().__init__(message)
        self.kind = kind


class NotEmulatedError(NotImplementedError):
    """A kernel uses something that the emulator does not have. The message names the kernel's source line.

    Raised when the kernel is compiled, before it runs. docs/EMULATION.md lists what is not emulated.
    """


class DeadlockError(EmulationError):
    """No thread can run and nothing in flight can wake one. The message lists every waiter."""


class ProtocolError(EmulationError):
    """The kernel has broken a rule of a synchronisation object or of memory.

    Examples: a missed barrier phase, an access out of bounds, shared memory freed while a copy still uses it, a signal
    to a semaphore that may arrive after the semaphore's device has ended the kernel.
    """


class StepLimitError(EmulationError):
    """The kernel ran for more scheduler steps than ``step_limit``: a livelock, or a limit that is too low."""
