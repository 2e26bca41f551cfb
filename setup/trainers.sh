#!/usr/bin/env bash
# usage: setup/trainers.sh VENV
# Makes VENV with MaxText and levanter, as constraints/trainers.txt pins them (1.4 GB). If it is there already, it does
# nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
stamp="$venv/.installed-trainers"
state=$(cat constraints/trainers.txt setup/trainers.sh | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then exit 0; fi
[ -x "$venv/bin/python" ] || "$(setup/find_python.sh)" -m venv "$venv"
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip "$@"; }
pip install --no-input --progress-bar off -q -r constraints/trainers.txt
# Its function for experts needs few of the packages that levanter names, and some of those contradict MaxText's.
pip install --no-input --progress-bar off -q --no-deps \
    marin-levanter==0.2.227.dev40316220070 marin-haliax==0.2.227.dev40316220070
printf '%s' "$state" >"$stamp"
