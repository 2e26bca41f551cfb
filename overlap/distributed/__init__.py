"""`overlap.initialize`: the processes of a job find each other.

launchers  what the launcher's environment variables say of this process: a `Place`
meeting    the processes of the job meet over TCP, without MPI; by_mpi does the same where only MPI knows the hosts
ports      which ports, and holding one until jax's coordinator has it
gpus       which GPUs a process gets, and which NCCL it needs
aborting   a process that fails ends the whole job
start      `initialize`, which goes through all of them
"""

from overlap.distributed.gpus import nccl_version
from overlap.distributed.start import initialize

__all__ = ["initialize", "nccl_version"]
