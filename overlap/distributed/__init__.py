"""`overlap.initialize`: the processes of a job find each other.

launchers  reads the launcher's environment variables: this process's `Place` in the job
meeting    lets the processes of the job meet over TCP, without MPI
by_mpi     asks MPI for the host of process 0, where only MPI knows the hosts
cards      what the processes tell each other when they meet
ports      chooses TCP ports, and holds one until jax's coordinator has it
gpus       chooses the GPUs of a process, and checks the NCCL that it needs
aborting   ends the whole job when a process fails
failures   ends this process when another one has failed
start      `initialize`, which calls all of these
"""

from overlap.distributed.gpus import nccl_version
from overlap.distributed.start import initialize

__all__ = ["initialize", "nccl_version"]
