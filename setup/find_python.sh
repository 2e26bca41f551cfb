#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make virtual environments: from $PYTHON, else PATH, else pyenv's versions.
# Each candidate is run to check it: pyenv's shims on PATH may refuse to start.
set -u

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' </dev/null >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON"; then command -v "$PYTHON"; exit 0; fi
    echo "PYTHON=$PYTHON is no Python >= 3.12 with venv and ensurepip: name another, or unset PYTHON." >&2
    exit 1
fi

shopt -s nullglob
pyenv_versions=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python3)
for candidate in python3.12 python3.13 python3.14 python3 python ${pyenv_versions[@]+"${pyenv_versions[@]}"}; do
    if path=$(command -v "$candidate" 2>/dev/null) && usable "$path"; then echo "$path"; exit 0; fi
done

cat >&2 <<TEXT
No Python >= 3.12 with venv was found on PATH or under ${PYENV_ROOT:-$HOME/.pyenv}/versions. Install one, for example:
    apt-get install python3.12 python3.12-venv      (Debian, Ubuntu, where it is packaged)
    pyenv install 3.12                              (anywhere; it need not be selected)
    conda create -n py312 python=3.12               then: PYTHON=.../envs/py312/bin/python make demo
TEXT
exit 1
