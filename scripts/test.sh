#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Makes the environment if needed and runs the tests: ./scripts/test.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
ensure_environment requirements-dev.txt
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
