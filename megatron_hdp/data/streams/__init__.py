# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Text as a source: files of records, tokenised a shard at a time while training goes on."""
