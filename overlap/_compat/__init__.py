"""What this library needs of jax and jax does not offer publicly: one module per thing, each with its reason.

Two kinds of modules:

    reads     of a private name: `backends.py`, `job_store.py`, `varying_axes.py`, and `nccl_versions.py`, which tests
              jax's version. They work with any jax that has the name
    mends     changes of jax's own modules: `cliques.py`, `mirrored_ranks.py`, `told_addresses.py`, `square_tiles.py`,
              `unequal_tiles.py`, `cluster_arrivals.py`, `warp_loops.py`. They are made by `apply` only, and only with a
              version of jax on which they were checked (`mend.py`)

Where mends are applied: `overlap/kernels/launch.py`, when a kernel of this library is lowered for a GPU, and
`overlap.primitives.prepare()`, for kernels that a user writes. Importing this package changes nothing and imports no
jax.

docs/private_names.md lists every private name that is used, and docs/upstream/ has for each thing the issue to file.
"""

from overlap._compat.backends import backends_are_initialized
from overlap._compat.cliques import device_ids, kernels_in_cliques
from overlap._compat.cluster_arrivals import CLUSTER_ARRIVALS
from overlap._compat.job_store import job_store
from overlap._compat.mend import Mend, apply
from overlap._compat.nccl_versions import oldest_nccl_of_one_process
from overlap._compat.square_tiles import SQUARE_TILES
from overlap._compat.told_addresses import peer_table, told_addresses
from overlap._compat.unequal_tiles import UNEQUAL_TILES
from overlap._compat.varying_axes import without_varying_axes
from overlap._compat.warp_loops import WARP_LOOPS

__all__ = [
    "CLUSTER_ARRIVALS",
    "SQUARE_TILES",
    "UNEQUAL_TILES",
    "WARP_LOOPS",
    "Mend",
    "apply",
    "backends_are_initialized",
    "device_ids",
    "job_store",
    "kernels_in_cliques",
    "oldest_nccl_of_one_process",
    "peer_table",
    "told_addresses",
    "without_varying_axes",
]
