# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: what the router's losses and counts mean under any plan."""
