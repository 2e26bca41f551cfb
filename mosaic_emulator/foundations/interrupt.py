"""How emulated launches end early: by Ctrl-C, or by the program itself (`stoppable`).

After Ctrl-C the launch stops, and KeyboardInterrupt comes out in the caller's own code.

Emulated kernels run inside callbacks of XLA, mostly in XLA's threads. With Python's own handler of SIGINT, such a
launch would run to its end after the KeyboardInterrupt. If the callback runs in the main thread, XLA would turn the
KeyboardInterrupt into an error of the callback. So the first use of the emulator replaces Python's own handler by a
handler that:

  - tells all launches under way to stop, and
  - raises KeyboardInterrupt, as Python's own handler does. If the main thread is inside a callback, the handler raises
    it only when the main thread has left the callback. Until then every launch stops at once, so that a loop of
    launches ends soon.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from jax.experimental import io_callback

# The modules whose functions are on the stack during a callback: jax's and the emulator's.
_CALLBACK_MODULES = (io_callback.__module__, __name__.replace("foundations.interrupt", "entry.lowering"))
_RETRY_S = 0.001

_interrupts = 0  # interrupts so far
_stop: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("_stop", default=None)
# Whether a KeyboardInterrupt waits for the main thread to leave its callback, or has ended the program.
_pending = False


def count() -> int:
    """How many interrupts there have been. A launch reads this number when it begins, to pass it to `stopped`."""
    return _interrupts


def stopped(count_before: int) -> bool:
    """Whether a launch that began when `count()` was `count_before` must stop."""
    return _pending or _interrupts != count_before


def pending() -> bool:
    """Whether a KeyboardInterrupt will be raised when the main thread has left its callbacks."""
    return _pending


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """While the context is active, the kernels that this thread compiles can be stopped.

    Yields:
        stop(), which may be called from any thread, also after the context: launches of these kernels, those under way
        and later ones, end at once. They raise nothing, and their results are NaN. Other kernels are not touched.

    Examples:
        >>> with mosaic_emulator.stoppable() as stop:
        ...     compiled = jax.jit(f).lower(x).compile()
        >>> stop()
        >>> bool(jnp.isnan(compiled(x)).all())
        True
    """
    event = threading.Event()
    token = _stop.set(event)
    try:
        yield event.set
    finally:
        _stop.reset(token)


def stop_event() -> threading.Event | None:
    """What says that a kernel that is compiled now must stop; None outside `stoppable`."""
    return _stop.get()


def install() -> None:
    """Installs the handler, if this is the main thread and Python's own handler is installed now."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def note() -> None:
    """Stops all launches under way."""
    global _interrupts
    _interrupts += 1


def defer() -> None:
    """Stops all launches, and interrupts the main thread again a little later."""
    global _pending
    note()
    _pending = True
    threading.Thread(target=_interrupt_again, name="mosaic-emulator-interrupt", daemon=True).start()


def end() -> None:
    """After the program has ended: if there was an interrupt, stops all launches, also those that have not begun."""
    global _pending
    _pending = _interrupts > 0


def _interrupt_again() -> None:
    global _pending
    time.sleep(_RETRY_S)
    # This comes before `interrupt_main`, which runs the handler at once: the handler may call `defer` again.
    _pending = False
    _thread.interrupt_main()


def _handle(number: int, frame: FrameType | None) -> None:
    if _in_callback(frame):
        defer()
        return
    note()
    signal.default_int_handler(number, frame)


# By this attribute, code that replaces Python's own handler for a while (`overlap.tuning.stop`) knows that it may
# replace this handler too.
_handle.raises_keyboard_interrupt = True  # pyright: ignore[reportFunctionMemberAccess]


def _in_callback(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACK_MODULES:
            return True
        frame = frame.f_back
    return False
