# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: makes .venv at the project's root, or finds it made.
#
#   ensure_environment REQUIREMENTS_FILE   sets PYTHON to the environment's interpreter

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# The first Python >= 3.12 with venv: PATH, then pyenv's versions, then uv's.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        candidate=$(uv python find '>=3.12' 2>/dev/null || true)
        if [ -n "$candidate" ]; then
            echo "$candidate"
            return 0
        fi
    fi
    echo "megatron_hdp needs Python 3.12 or newer with venv: install python3.12 (apt install" \
        "python3.12-venv, pyenv install 3.12, or uv python install 3.12) and run this again." >&2
    return 1
}

# Changes when what is to be installed does.
environment_stamp() {
    cat "$ROOT/pyproject.toml" "$ROOT"/requirements*.txt "$1" "$ROOT/scripts/lib/environment.sh" |
        sha256sum | cut -d' ' -f1
}

ensure_environment() {
    local requirements="$ROOT/$1" venv="$ROOT/.venv" stamp found
    stamp=$(environment_stamp "$requirements")
    PYTHON="$venv/bin/python"
    exec 9>"$ROOT/.venv.lock"
    flock 9
    found=$(cat "$venv/.stamp-$1" 2>/dev/null || true)
    if [ "$found" != "$stamp" ] || ! [ -x "$PYTHON" ]; then
        if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            local base
            base=$(find_python)
            echo "making .venv with $("$base" --version) (a download of some gigabytes, once)" >&2
            rm -rf "$venv"
            "$base" -m venv "$venv"
        fi
        "$PYTHON" -m pip install -q --disable-pip-version-check -r "$requirements"
        "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps -e "$ROOT"
        echo "$stamp" >"$venv/.stamp-$1"
    fi
    flock -u 9
    exec 9>&-
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1
}
