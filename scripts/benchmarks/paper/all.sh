#!/usr/bin/env bash
# Simulates the paper's figures and writes docs/reproduction.md. No GPU; minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-../../../.venv/bin/python}"
for script in fig04 fig20 scaling fig17 report; do
    echo "== $script"
    "$python" "$script.py"
done
