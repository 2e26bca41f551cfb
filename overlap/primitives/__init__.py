"""The device-side words of `overlap`: peers, flags, copies and the handshakes.

These run *inside* a `plgpu.kernel` body. They are thin; what they add to Mosaic GPU's own words is a name for each
completion rule, so that a kernel reads as its argument for being correct. That argument is written down here, once.

Memory ordering
---------------
Three agents touch memory: threads (the *generic proxy*), the copy engine (the *async proxy*: TMA loads and stores) and
the tensor cores (which read shared memory through the async proxy). Two accesses to the same bytes are ordered only by
a chain of the links below; anything else is a race, however improbable.

1. *A load has landed* when a wait on its mbarrier returns. The waiting threads, and what they issue later in either
   proxy, see its bytes.
2. *A store has been read* when `wait_stores_read` returns: its shared-memory source may be overwritten. Nothing is
   known about its destination.
3. *A store has landed* when `wait_stores_landed` returns: its bytes are visible to the thread that issued and awaited
   it. Only now may a flag be raised for them.
4. *A flag* is a semaphore that only grows. `semaphore_signal` is a release: whatever its thread has seen or done is
   visible to the one whose `semaphore_wait` (an acquire) returns because of it. A flag within one GPU has GPU scope;
   one that crosses NVLink (`semaphore_signal_peer`) has system scope and costs accordingly.
5. *Crossing the proxies*: after a generic-proxy acquire, a TMA load of the data that the flag stands for needs
   `fence_async_proxy` between the two, since the acquire orders generic accesses only. Shared memory written by
   threads needs `plgpu.commit_smem` before a TMA store or a wgmma reads it.
6. *A flag counts one kind of event.* Each (source shard, row block) has a flag of its own, with an exact final count. A
   counter shared by several rounds lets one fast CTA's second signal stand in for a slow CTA's first.
7. *The start*: nobody may read a peer's inputs or signal its flags before that peer has begun the kernel: until then
   its inputs are not ready and its flags not zero. Either the framework runs a barrier over all devices before the
   kernel, or the kernel begins with `Handshake.begin`.
8. *The end*: a device may not leave the kernel while a peer can still read its inputs or signal its flags, because
   XLA then reuses the memory. `Handshake.leave` is that rule.

And one of progress: *nobody waits for a CTA that may not have started.* Other kernels may hold some of the cores until
another device gets on, so what a peer waits for is done by whichever CTAs are there: they draw it from a counter.
"""

from overlap.primitives.atomics import draw, each_drawn
from overlap.primitives.copies import Chunking, copy_chunks, tma_load, tma_store, wait_stores_landed, wait_stores_read
from overlap.primitives.handshake import HANDSHAKE_FLAGS, Handshake
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
