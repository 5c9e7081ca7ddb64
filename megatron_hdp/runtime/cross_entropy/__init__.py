# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel cross-entropy: fused (Triton), or chunked with the output projection."""
