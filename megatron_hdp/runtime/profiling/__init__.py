# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Measures a launch line's model on this machine, for `python -m megatron_hdp profile`."""
