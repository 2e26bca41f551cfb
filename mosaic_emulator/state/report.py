"""Makes the messages of faults."""

from __future__ import annotations

from ..foundations.settings import Settings
from ..foundations.source_lines import Instruction
from .races import Access
from .sync import Semaphore

_WAIT = "a completed wait for the operation, a signal or arrival after that, and a wait for the signal"
_COMMIT = "a tcgen05_commit_arrive after the operation, in all CTAs that take part, and a wait for its barrier"
# For accesses that a special chain must order before other accesses: the chain that is expected.
_ORDERS = {
    "tcgen05 mma": _COMMIT,
    "tcgen05 copy": _COMMIT,
    "tensor memory load": "wait_load_tmem() by its thread, an arrival after that, and a wait for the barrier",
    "tensor memory store": "commit_tmem() by its thread, and if others use it an arrival after that, and a wait",
}


def how_to_repeat(settings: Settings, name: str, *, is_replay: bool) -> str:
    """Says which call repeats a run exactly."""
    s = settings
    if is_replay:
        return (
            f"[launches of {name}; repeat with run_sequence(launches, {s.completion!r}, {s.scheduler!r}, "
            f"{s.seed}, detect_races={s.detect_races}, resident={s.resident})]"
        )
    return (
        f"[kernel {name!r}; repeat with emulate(cores={s.cores}, completion={s.completion!r}, "
        f"scheduler={s.scheduler!r}, seed={s.seed}, resident={s.resident}, laps={s.laps})]"
    )


def race(kind: str, prior: Access, access: Access) -> str:
    """The message for two accesses that nothing orders, or that lack a proxy fence or the tensor core's order."""
    name = access.view.buffer.name
    if kind == "proxy":
        shared = access.view.buffer.space == "smem"
        fence = "commit_smem()" if shared else "a proxy fence (fence.proxy.async)"
        # What another CTA has stored here is made visible to the asynchronous proxy by the CTA that reads it.
        by_reader = not shared or prior.what.startswith("async store")
        place = f"by {access.thread} after its wait" if by_reader else "by the writer before it arrives"
        return (
            f"race (missing proxy fence) on {name}:\n  {access}\n  comes after\n  {prior}\n  and is ordered after "
            f"it, but no proxy fence stands on the way. Expected: {fence} {place}; got none"
        )
    if kind == "tensor":
        return (
            f"race (the tensor core is not ordered) on {name}:\n  {access}\n  comes after\n  {prior}\n  and is ordered "
            "after it, but not for the tensor core. Expected: orders_tensor_core=True at every barrier on the way; "
            "got one without"
        )
    verb = "write" if prior.write else "read"
    return (
        f"race on {name}:\n  {access}\n  is not ordered with the earlier {verb}\n  {prior}\n  Expected: "
        f"{_ORDERS.get(prior.what.split(',')[0], _WAIT)}; got no such chain"
    )


def not_begun(thread: object, device: int, what: str, lacks_fence: bool) -> str:
    """The message for an access to a peer that may not have begun the launch."""
    if lacks_fence:
        return (
            f"too early (missing proxy fence): {thread} {what} of device {device} through the copy engine, and has "
            "only waited for that device to begin. Expected: a proxy fence (fence.proxy.async) behind the wait"
        )
    return (
        f"too early: {thread} {what} of device {device}, which may not have begun this launch yet. Expected: a "
        "wait for something that device does in this launch, or the framework's barrier (skip_device_barrier=False)"
    )


def has_left(thread: object, device: int, what: str) -> str:
    """The message for an access to a peer that has ended the launch."""
    return (
        f"too late: {thread} {what} of device {device}, which has left the kernel. Expected: device {device} waits for "
        "something that comes after this"
    )


def left_early(device: int, access: Access) -> str:
    """The message for a device that may end its kernel while a peer still uses its memory."""
    return (
        f"device {device} may leave the kernel before\n  {access}\n  is complete (missing exit handshake, or too "
        f"weak a wait before it). Expected: {access.thread} waits for its copy, then signals device {device}, and "
        f"device {device} waits for that before its last CTA ends"
    )


def freed_early(cta: object, access: Access) -> str:
    """The message for a CTA's memory that is freed while a copy or a product still uses it."""
    kind = "tensor" if access.view.buffer.space == "tmem" else "shared"
    return (
        f"{kind} memory freed too early:\n  {access}\n  may still be in flight when the memory of "
        f"{access.view.buffer.name} is given out again or {cta} ends; nothing in the CTA waits for it"
    )


def left_cluster(cta: object, what: str) -> str:
    """The message for a CTA that ends while another CTA of the cluster still uses its memory or barriers."""
    return (
        f"left the cluster too early: {cta} may end before\n  {what}\n  is over, which reaches into its shared memory. "
        f"Expected: {cta} waits for that (or for a barrier that its peers arrive on after it) before it ends"
    )


def unwritten(access: Access, wholly: bool) -> str:
    """The message for a read of memory that nobody has written before, wholly or in part."""
    got = "none of it" if wholly else "a part of it"
    return (
        f"read of memory that nobody has written:\n  {access}\n  Expected: written before in this launch; got {got} "
        "(the wrong peer, shard or stage?)"
    )


def late_signal(semaphore: Semaphore, thread: object, instruction: Instruction) -> str:
    """The message for a signal for which the semaphore's device does not wait."""
    owner = f"device {semaphore.device}"
    return (
        f"late signal: {thread} at {instruction.source} signals {semaphore.name} of {owner}, and no wait of {owner} "
        f"needs it. It may arrive after {owner} has left the kernel and its semaphores have been reset for the next "
        "launch"
    )
