# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One thing that doctor looked at."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """What was found, and what to do about it."""

    name: str
    found: str
    advice: str = ""
    """A sentence with the way out; empty when all is well."""
