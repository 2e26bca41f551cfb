#!/usr/bin/env bash
# usage: setup/venv.sh VENV CONSTRAINTS EXTRA...
# Makes VENV and installs the working tree into it (editable), with the EXTRAs of pyproject.toml and the versions of
# CONSTRAINTS. If NVIDIA GPUs are visible, it adds jax's CUDA packages. If nothing has changed since the last run, it does
# nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 constraints=$2
shift 2
extras=$(IFS=,; echo "$*")

gpus_visible() { [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
case "${OVERLAP_CPU_ONLY:-0}" in
    0 | 1) ;;
    *) echo "\`OVERLAP_CPU_ONLY\` must be 1 or 0, got '$OVERLAP_CPU_ONLY': correct the variable, or unset it for 0" >&2; exit 1 ;;
esac
if [ "${OVERLAP_CPU_ONLY:-0}" != 1 ] && gpus_visible; then
    # CUDA 13 needs driver 580 or newer; an older one runs CUDA 12.
    driver=$(cat /sys/module/nvidia/version 2>/dev/null || nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    major=${driver%%.*}
    if [[ "$major" =~ ^[0-9]+$ ]] && [ "$major" -lt 580 ]; then extras="$extras,cuda12"; else extras="$extras,cuda13"; fi
fi

# The name of the stamp says which extras are installed. Its content depends on the files from which they were installed.
stamp="$venv/.installed-${extras//,/-}"
state=$(cat pyproject.toml "$constraints" constraints/common.txt | cksum; pwd)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then exit 0; fi

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=$(setup/find_python.sh)
    echo "Making $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
echo "Installing overlap[$extras] into $venv (some minutes on the first run)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --no-input --progress-bar off --constraint "$constraints" --editable ".[$extras]" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "pip could not install overlap[$extras] (its last lines are above)." >&2
    exit 1
fi
printf '%s' "$state" >"$stamp"
