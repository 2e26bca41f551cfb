"""Starts a Slurm cluster of one node for the tests: munged, slurmctld and slurmd, run by this user in one folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_FOLDERS = os.pathsep.join(("/usr/sbin", "/usr/local/sbin"))
_MACHINE = socket.gethostname().split(".")[0]
_CONFIGURATION = """
ClusterName=overlap
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
KillWait=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
GresTypes=gpu
NodeName={machine} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str | None:
    """Returns why Slurm cannot run here, or None."""
    missing = [name for name in _PROGRAMS if not _program(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd starts jobs for root only"


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_FOLDERS)


class Slurm:
    """Starts and ends the daemons of a Slurm cluster whose files are in `folder`, and runs its jobs."""

    def __init__(self, folder: pathlib.Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, timeout_s: float) -> str | None:
        """Starts all daemons. Returns None, or the reason if the nodes were not ready within `timeout_s`."""
        sockets = [socket.create_server(("", 0)) for _ in range(2)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        text = _CONFIGURATION.format(machine=_MACHINE, folder=self.folder, ports=ports)
        (self.folder / "slurm.conf").write_text(text)
        # Plain files stand for the GPUs; Slurm only counts them.
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        at = [f"--{name}={self.folder}/munge.{ending}" for name, ending in files.items()]
        self._daemon("munged", "--foreground", "--force", *at)
        until = time.monotonic() + timeout_s
        while not (self.folder / "munge.socket").exists() and time.monotonic() < until:
            time.sleep(0.05)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        while time.monotonic() < until:
            if self.output("sinfo", "--noheader", "--format=%T %D").strip() == "idle 1":
                return None
            time.sleep(0.1)
        logs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{log.name}: {line}" for log in logs for line in log.read_text().splitlines()[-3:])

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()

    def output(self, program: str, *arguments: str | pathlib.Path) -> str:
        command = [str(_program(program)), *map(str, arguments)]
        return subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, text=True, timeout=100,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout  # fmt: skip

    def batch(self, *arguments: str | pathlib.Path, timeout_s: float = 60) -> int:
        """Submits a batch job, and returns its exit status. (sbatch --wait looks every 10 s only.)"""
        job, until = self.output("sbatch", "--parsable", *arguments).strip(), time.monotonic() + timeout_s
        while time.monotonic() < until:
            words = self.output("scontrol", "show", "job", job).split()
            told = dict(part.split("=", 1) for part in words if "=" in part)
            if told["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return int(told["ExitCode"].split(":")[0])
            time.sleep(0.1)
        raise TimeoutError(f"job {job} does not end")

    def _daemon(self, name: str, *arguments: str) -> None:
        log = self.folder / f"{name}-{len(self._daemons)}.out"
        with log.open("wb") as output:
            daemon = subprocess.Popen([str(_program(name)), *arguments], env=self.environment, stdout=output,
                                      stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        self._daemons.append(daemon)
