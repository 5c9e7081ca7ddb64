# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ring attention, and the kernels under it."""

from __future__ import annotations

from megatron_hdp.runtime.attention.function import ring_attention
from megatron_hdp.runtime.attention.kernels import Kernel, describe_kernels, select_kernel

__all__ = ["Kernel", "describe_kernels", "ring_attention", "select_kernel"]
