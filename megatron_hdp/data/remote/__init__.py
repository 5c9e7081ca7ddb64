# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""ByteScale's remote data loader (arXiv 2502.21231, section 6) on Ray: `--hdp-loader ray`.

Servers read slices and tell lengths, one scheduler plans, a client in every training rank fetches
that rank's slices only. Nothing outside this package imports Ray, and nothing here does before a
cluster is started or joined.
"""
