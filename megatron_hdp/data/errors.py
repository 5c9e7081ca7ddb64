# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What can be wrong with data; importable without torch."""


class CorpusError(ValueError):
    """A corpus cannot be used; the message names the flag or file, the value and the way out."""
