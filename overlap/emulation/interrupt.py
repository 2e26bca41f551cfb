"""Ctrl-C during an emulated launch: the launch stops, and KeyboardInterrupt comes out in the caller's own code.

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
import signal
import threading
import time
from typing import Any

from jax.experimental import io_callback

# The modules whose functions are on the stack during a callback: jax's and the emulator's.
_CALLBACK_MODULES = (io_callback.__module__, f"{__package__}.lowering")
_RETRY_S = 0.001

_interrupts = 0  # interrupts so far, calls of `stop` included
_stops = 0  # calls of `stop` so far
_pending = False  # whether a KeyboardInterrupt waits for the main thread to leave its callback


def count() -> int:
    """How many interrupts there have been. A launch reads this number when it begins, to pass it to `stopped`."""
    return _interrupts


def stopped(count_before: int) -> bool:
    """Whether a launch that began when `count()` was `count_before` must stop."""
    return _pending or _interrupts != count_before


def pending() -> bool:
    """Whether a KeyboardInterrupt will be raised when the main thread has left its callbacks."""
    return _pending


def install() -> None:
    """Installs the handler, if this is the main thread and Python's own handler is installed now."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def note() -> None:
    """Stops all launches under way."""
    global _interrupts
    _interrupts += 1


def stop() -> None:
    """Stops all emulated launches under way, from any thread. Later launches run as usual.

    The stopped launches raise nothing, but their results are NaN: whoever calls this must not use them. Inside
    `emulate` KeyboardInterrupt is raised, as after Ctrl-C.

    Example:
      >>> from overlap import emulation
      >>> timer = threading.Timer(60.0, emulation.stop)
    """
    global _stops
    _stops += 1
    note()


def stops() -> int:
    """How many calls of `stop` there have been."""
    return _stops


def defer() -> None:
    """Stops all launches, and interrupts the main thread again a little later."""
    global _pending
    note()
    _pending = True
    threading.Thread(target=_interrupt_again, name="overlap-emulation-interrupt", daemon=True).start()


def _interrupt_again() -> None:
    global _pending
    time.sleep(_RETRY_S)
    # This comes before `interrupt_main`, which runs the handler at once: the handler may call `defer` again.
    _pending = False
    _thread.interrupt_main()


def _handle(number: int, frame: Any) -> None:
    if _in_callback(frame):
        defer()
        return
    note()
    signal.default_int_handler(number, frame)


# By this attribute, code that replaces Python's own handler for a while (`overlap.tuning.interrupt`) knows that it may
# replace this handler too.
_handle.raises_keyboard_interrupt = True  # pyright: ignore[reportFunctionMemberAccess]


def _in_callback(frame: Any) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACK_MODULES:
            return True
        frame = frame.f_back
    return False
