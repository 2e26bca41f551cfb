"""The parts of jax that this library needs and that jax does not make public: a module for each, with the reason.

Two kinds of modules:

    reads     `backends.py`, `job_store.py`, `kernel_texts.py` and `varying_axes.py` use a private name of jax and
              change nothing. They work with any jax that has the name. `nccl_versions.py` and `kernel_axes.py` use no
              private name: the first depends on jax's version, the second on how jax names the axes of kernels
    patches     `host_meshes.py`, `mirrored_ranks.py`, `told_addresses.py`, `square_tiles.py`, `unequal_tiles.py`,
              `cluster_refs.py`, `equal_texts.py` and `warp_loops.py` change jax's own modules. Only `apply` makes these
              changes, and only with a version of jax on which they were checked (`patch.py`)

Where patches are applied: `overlap/kernels/launch.py`, when a kernel of this library is lowered for a GPU, and
`overlap.primitives.prepare()`, for kernels that a user writes. Importing this package changes nothing and imports no
jax.

docs/private_names.md lists every private name that is used. docs/upstream.md says for each module what
to ask of jax.
"""

from overlap._compat.backends import backends_are_initialized
from overlap._compat.cluster_refs import CLUSTER_REFS
from overlap._compat.equal_texts import equal_texts, without_locations
from overlap._compat.host_meshes import device_ids, kernels_on_host_meshes
from overlap._compat.job_store import job_store
from overlap._compat.kernel_axes import has_axis_of_jax
from overlap._compat.kernel_texts import known_kernels
from overlap._compat.nccl_versions import oldest_nccl_of_one_process
from overlap._compat.patch import Patch, apply
from overlap._compat.square_tiles import SQUARE_TILES
from overlap._compat.told_addresses import peer_table, told_addresses
from overlap._compat.unequal_tiles import UNEQUAL_TILES
from overlap._compat.varying_axes import without_varying_axes
from overlap._compat.warp_loops import WARP_LOOPS

__all__ = [
    "CLUSTER_REFS",
    "SQUARE_TILES",
    "UNEQUAL_TILES",
    "WARP_LOOPS",
    "Patch",
    "apply",
    "backends_are_initialized",
    "device_ids",
    "equal_texts",
    "has_axis_of_jax",
    "job_store",
    "kernels_on_host_meshes",
    "known_kernels",
    "oldest_nccl_of_one_process",
    "peer_table",
    "told_addresses",
    "without_locations",
    "without_varying_axes",
]
