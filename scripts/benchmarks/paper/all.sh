#!/usr/bin/env bash
# Simulates the paper's figures and writes docs/reproduction.md. No GPU; minutes on two cores.
# Every script is one figure or table and runs by itself; see its docstring.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-../../../.venv/bin/python}"
for script in fig04 fig06 fig12_13 fig18 fig20 fig21 rivals scaling fig17 levers report; do
    echo "== $script"
    "$python" -W ignore "$script.py"
done
