# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""From text to a corpus that Megatron reads: what tools/build_corpus.py is made of."""
