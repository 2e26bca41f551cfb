"""Device-side primitives: peers, semaphores, copies (TMA), counters and handshakes. docs/primitives.md shows their use.

Call them inside the body of a `plgpu.kernel`. They are thin wrappers of Mosaic GPU's functions. Each rule about when an
operation is complete has a function of its own, so that a kernel's calls show why the kernel is correct. The rules are
written down here.

Memory ordering
---------------
Three agents access memory: threads (the *generic proxy*), the copy engine (the *async proxy*: TMA loads and stores) and
the tensor cores (which read shared memory through the async proxy). Two accesses to the same bytes, one of them a
write, are ordered only by a chain of the links below. Without such a chain they are a race, however improbable.

1. *A load has landed* when a wait on its mbarrier returns. The waiting threads see its bytes. So does whatever they
   issue later, in either proxy.
2. *A store has been read* when `wait_stores_read` returns: its source in shared memory may be overwritten. Nothing is
   known about its destination.
3. *A store has landed* when `wait_stores_landed` returns: its bytes are visible to the thread that issued the store and
   waited for it. Only now may a flag be raised for them.
4. *A flag* is a semaphore that only grows. Raising it is a release: everything that its thread has seen or done before
   is visible to the thread whose wait (an acquire) returns because of it. `semaphore_signal` and `semaphore_wait` have
   GPU scope: both sides are on one GPU. `semaphore_signal_peer` and `semaphore_wait_peer` have system scope: the signal
   crosses NVLink, and costs accordingly.
5. *Between the proxies*: an acquire orders generic accesses only. A TMA load of the data that a flag stands for needs
   `fence_async_proxy` between the wait and the load (`semaphore_wait_peer` includes it). Shared memory that threads
   have written needs `plgpu.commit_smem` before a TMA store or a wgmma reads it.
6. *A flag counts one kind of event.* For example, each (source shard, row block) has a flag of its own, with an exact
   final count. If several rounds shared a counter, the second signal of a fast CTA could stand in for the first signal
   of a slow CTA.
7. *The start*: nobody may read a peer's inputs or raise its flags before that peer has begun the kernel. Until then the
   peer's inputs are not ready and its flags are not zero. Either the framework runs a barrier over all devices before
   the kernel, or the kernel begins with `Handshake.begin`.
8. *The end*: a device may not leave the kernel while a peer can still read its inputs or raise its flags, because XLA
   then reuses the memory. `Handshake.leave` enforces this rule.

One more rule is about progress: *nobody waits for a CTA that may not have started.* Other kernels may hold some of the
SMs until another device proceeds. So the work for which a peer waits is done by whichever CTAs are running: they draw
it from a counter (`draw`, `each_drawn`).
"""

import os

from mosaic_emulator.foundations.source_lines import name_callers_of
from overlap import _compat, _settings
from overlap.primitives.atomics import draw, each_drawn
from overlap.primitives.copies import Chunking, copy_chunks, tma_load, tma_store, wait_stores_landed, wait_stores_read
from overlap.primitives.handshake import HANDSHAKE_FLAGS, Handshake
from overlap.primitives.host_mesh import ON_HOST_MESHES
from overlap.primitives.peers import PeerGroup
from overlap.primitives.semaphores import (
    converge_warp,
    fence_async_proxy,
    semaphore_signal,
    semaphore_signal_peer,
    semaphore_wait,
    shared_semaphores,
)
from overlap.primitives.waits import semaphore_wait_peer

__all__ = [
    "HANDSHAKE_FLAGS",
    "Chunking",
    "Handshake",
    "PeerGroup",
    "converge_warp",
    "copy_chunks",
    "draw",
    "each_drawn",
    "fence_async_proxy",
    "prepare",
    "semaphore_signal",
    "semaphore_signal_peer",
    "semaphore_wait",
    "semaphore_wait_peer",
    "shared_semaphores",
    "tma_load",
    "tma_store",
    "wait_stores_landed",
    "wait_stores_read",
]

# In the emulator's reports, a fault in a primitive is on the line that calls the primitive.
name_callers_of(os.path.dirname(__file__))


def prepare() -> None:
    """Prepares jax for kernels of your own that use these primitives.

    Call it before the first such kernel is compiled for GPUs. The operations of this library do this by themselves.
    Kernels that communicate, and single warps that run loops of unknown length, need changes in jax's own modules,
    which stay until the process ends (`overlap/_compat/`). A second call changes nothing. Kernels that run emulated on
    a CPU do not need it.

    Raises:
      RuntimeError: the changes were not checked with the installed jax; or an environment variable of this library has
        a wrong value.

    Examples:
      >>> from overlap import primitives
      >>> primitives.prepare()
    """
    _settings.require_valid()
    _compat.apply(ON_HOST_MESHES, _compat.WARP_LOOPS)
