#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Makes the environment if needed, builds a corpus, trains static and with HDP, prints the result.
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
ensure_environment requirements.txt
cd "$ROOT"
exec "$PYTHON" -W ignore scripts/quickstart.py "$@"
