# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at besides Megatron: this machine's GPUs, links, limits and memory."""
