"""The key-value store that connects the processes of `jax.distributed`.

Reason: the processes of a job tell each other when they fail (`overlap/distributed/failures.py`). `jax.distributed`
has started a key-value store for messages of this kind, but gives no public access to the store's client. A server of
this library's own would need a port and an address.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a public key-value store of `jax.distributed`.
For upstream: docs/upstream.md#the-jobs-store.
"""

from __future__ import annotations

from typing import Any

from overlap._compat.patch import private


def job_store() -> Any:
    """The client of the key-value store; None in a single process.

    This library uses its methods `key_value_set` and `key_value_dir_get`.
    """
    return private("jax._src.distributed", "global_state").client
