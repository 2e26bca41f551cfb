"""The words of the faults."""

from __future__ import annotations

from typing import Any


def how_to_repeat(machine: Any) -> str:
    """The settings that repeat a run exactly."""
    s = machine.settings
    return (
        f"[kernel {machine.name!r}; repeat with emulate(cores={s.cores}, completion={s.completion!r}, "
        f"scheduler={s.scheduler!r}, seed={s.seed}, resident={s.resident})]"
    )


def race(kind: str, prior: Any, access: Any) -> str:
    """Two accesses that nothing orders, or that lack a proxy fence."""
    name = access.view.buffer.name
    if kind == "proxy":
        fence = "commit_smem()" if access.view.buffer.space == "smem" else "a proxy fence (fence.proxy.async)"
        return (
            f"race (missing proxy fence) on {name}: {access} comes after {prior}, and a signal orders them, but {fence} "
            f"is missing between the wait that learned of the first and the second. Expected: {fence} by {access.thread} after "
            "its wait (in shared memory: by the writer before it arrives)"
        )
    verb = "write" if prior.write else "read"
    return (
        f"race on {name}: {access} is not ordered with the {verb} by {prior.thread}: {prior}. Expected: a chain of a "
        f"completed wait, a signal or arrival after it, and a wait for that before this access; got none"
    )


def left_early(device: int, access: Any) -> str:
    """A device may end its kernel while a peer still uses its memory."""
    return (
        f"device {device} may leave the kernel before {access} is complete (missing exit handshake): expected that "
        f"{access.thread} waits for its copy and then signals device {device}, which waits for that before its last CTA ends"
    )


def freed_early(cta: Any, access: Any) -> str:
    """Shared memory that goes to somebody else while a copy uses it."""
    return (
        f"shared memory freed too early: {access} may still be in flight when the memory of {access.view.buffer.name} is given out "
        f"again or {cta} ends; nothing in the CTA waits for it"
    )


def unwritten(access: Any) -> str:
    """A read of memory that holds nothing yet."""
    return (
        f"read of memory that nobody has written: {access}. Expected: written before in this launch; got none of it (the wrong "
        "peer, shard or slot?)"
    )


def late_signal(semaphore: Any, thread: Any, instruction: Any) -> str:
    """A signal that its owner does not wait for."""
    return (
        f"late signal: {thread} at {instruction.source} signals {semaphore.name} of device {semaphore.device}, and no wait of "
        f"device {semaphore.device} is satisfied only by it. It may arrive after device {semaphore.device} has left the kernel "
        "and its semaphores have been reset for the next launch"
    )


def deadlock(machine: Any) -> str:
    """Every waiter, and the CTAs that never started."""
    waiting = [t for t in machine.threads if not t.done]
    lines = [f"deadlock: {len(waiting)} threads wait and nothing is in flight that could wake one"]
    for thread in waiting[:64]:
        why = thread.blocked[1]() if thread.blocked else "is not blocked"
        source = machine.program.instructions[thread.pc].source
        lines.append(f"  {thread}: {why} (at {source}, since step {thread.blocked_at})")
    if len(waiting) > 64:
        lines.append(f"  ... and {len(waiting) - 64} more")
    for device, queue in enumerate(machine._queue):
        if queue:
            names = ", ".join(str(cta).split(", ", 1)[1] for cta in queue[:8])
            lines.append(
                f"  device {device}: {len(queue)} CTAs were never launched ({names}{', ...' if len(queue) > 8 else ''}), as only "
                f"{machine.settings.resident} fit at a time"
            )
    return "\n".join(lines)
