# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 4: the length generators against every statement of the text (sections 3.1 and 8.2)."""

from __future__ import annotations

import numpy as np
from common import write

from megatron_hdp.planning.distributions import draw

K = 1024


def main() -> None:
    """Draws four billion tokens of each set and compares."""
    byted, github = (draw(name, 4 * 10**9, 2**21, 1) for name in ("byted", "github"))

    def of_tokens(lengths: np.ndarray, least: int) -> float:
        return float(lengths[lengths >= least].sum() / lengths.sum())

    rows = [
        ("Byted: samples up to 4K", 0.80, float((byted <= 4 * K).mean())),
        ("Byted: samples of 2M", 0.0005, float((byted >= 2**21).mean())),
        ("Byted: tokens in samples of 2M", 0.121, of_tokens(byted, 2**21)),
        ("Byted: samples of 128K and more", 0.01, float((byted >= 128 * K).mean())),
        ("Byted: tokens in samples of 128K and more", 0.443, of_tokens(byted, 128 * K)),
        ("Byted: tokens in sequences over 256K", 0.37, of_tokens(byted, 256 * K)),
        ("GitHub: tokens in sequences over 128K", 0.162, of_tokens(github, 128 * K)),
        ("GitHub: tokens in sequences over 256K", 0.098, of_tokens(github, 256 * K)),
    ]
    write("fig04", {"rows": [dict(zip(("statement", "paper", "ours"), r, strict=True))
                             for r in rows]})  # fmt: skip


if __name__ == "__main__":
    main()
