"""Makes the message of a deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from ..state.sync import Meeting
from .machine import Machine, Thread

_MOST = 64  # threads that the message lists


def message(machines: Sequence[Machine]) -> str:
    """Returns the message: each waiting thread, the devices that a barrier waits for, the CTAs that never started.

    Threads that wait for semaphores and mbarriers come first: one of them is the cause. Threads that wait for other
    threads of their CTA, such as a warpgroup for the warps of a `warp_map`, come after them.
    """
    waiting = sorted((t for m in machines for t in m.threads if not t.done), key=_waits_for_own_cta)
    lines = [f"deadlock: {len(waiting)} threads wait and nothing is in flight that could wake one"]
    for thread in waiting[:_MOST]:
        why = thread.blocked[1]() if thread.blocked else "is not blocked"
        source = thread.machine.program.instructions[thread.pc].source
        lines.append(f"  {thread.in_launch}: {why} (at {source}, since step {thread.blocked_at})")
    if len(waiting) > _MOST:
        lines.append(f"  ... and {len(waiting) - _MOST} more")
    for machine in machines:
        missing = [device for device in machine.mesh.devices if device not in machine.arrived]
        if machine.program.has_barrier and machine.arrived and missing:
            lines.append(
                f"  devices {machine.arrived} wait at the framework's barrier before launch {machine.number} "
                f"({machine.name}) for devices {missing}"
            )
        for device, queue in machine.queued.items():
            if not queue:
                continue
            names = ", ".join(str(cta).split(", ", 1)[1] for cta in queue[:8]) + (", ..." if len(queue) > 8 else "")
            fit = machine.resident
            of = f" of launch {machine.number} ({machine.name})" if len(machines) > 1 else ""
            lines.append(
                f"  device {device}: {len(queue)} CTAs{of} were never launched ({names}), as only {fit} fit at a time"
            )
    return "\n".join(lines)


def _waits_for_own_cta(thread: Thread) -> bool:
    return thread.blocked is not None and isinstance(thread.blocked[0], Meeting)
