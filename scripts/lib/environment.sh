# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and .ci/run: makes .venv at the project's root, or finds it made.
#
#   ensure_environment REQUIREMENTS_FILE   sets PYTHON to the environment's interpreter
#
# A stamp in .venv, written last, holds a hash of what was installed; while it fits nothing is done.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LOCK_WAIT_S=1800

# Whether $1 is a Python >= 3.12 that can make an environment.
is_usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# The first usable Python: PATH, then pyenv's versions, then uv's. Megatron has wheels for 3.12 and
# 3.13; others would have to compile it.
find_python() {
    local candidate
    for candidate in python3.12 python3.13 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3 \
        "$(uv python find --no-project '3.12' 2>/dev/null || true)" \
        "$(uv python find --no-project '3.13' 2>/dev/null || true)" \
        python3 python; do
        if [ -n "$candidate" ] && is_usable_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    echo "megatron_hdp needs Python 3.12 or newer with venv: install it (apt install" \
        "python3.12-venv, pyenv install 3.12, or uv python install 3.12) and run this again." >&2
    return 1
}

# Changes when what is to be installed does.
environment_stamp() {
    cat "$ROOT/pyproject.toml" "$ROOT"/requirements*.txt | sha256sum | cut -d' ' -f1
}

# Whether $2 is installed from requirements file $1, or from a file that includes it.
is_installed() {
    [ -x "$PYTHON" ] || return 1
    [ "$(cat "$ROOT/.venv/.stamp-$1" 2>/dev/null)" = "$2" ] && return 0
    [ "$1" = requirements.txt ] && is_installed requirements-dev.txt "$2"
}

# A new .venv; a first installation that was interrupted leaves no trust in what is there.
make_venv() {
    local venv="$ROOT/.venv" base
    if [ -e "$venv" ] && ! [ -e "$venv/.incomplete" ] && is_usable_python "$PYTHON" &&
        "$PYTHON" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    base=$(find_python)
    echo "making .venv with $("$base" --version) (a download of some gigabytes, once)" >&2
    rm -rf "$venv"
    mkdir "$venv"
    touch "$venv/.incomplete"
    "$base" -m venv "$venv"
}

ensure_environment() {
    local requirements="$1" stamp
    PYTHON="$ROOT/.venv/bin/python"
    stamp=$(environment_stamp)
    if ! is_installed "$requirements" "$stamp"; then
        exec 9>"$ROOT/.venv.lock"
        flock -n 9 || echo "waiting for another set-up of .venv" >&2
        if ! flock -w "$LOCK_WAIT_S" 9; then
            echo "another set-up holds $ROOT/.venv.lock for $LOCK_WAIT_S s: end it, then run" \
                "this again." >&2
            return 1
        fi
        is_installed "$requirements" "$stamp" || install "$requirements" "$stamp"
        exec 9>&-
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
}

install() {
    local pip=("$ROOT/.venv/bin/python" -m pip install -q --disable-pip-version-check)
    make_venv
    "${pip[@]}" -r "$ROOT/$1"
    "${pip[@]}" --no-deps -e "$ROOT"
    rm -f "$ROOT/.venv/.incomplete"
    echo "$2" >"$ROOT/.venv/.stamp-$1"
}
