# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What sliding windows leave of a sequence's attention, and of a ring's transfers.

A token of a windowed layer sees itself and `window` tokens before it. Rings are zigzag: of 2P
chunks, member i holds chunks i and 2P-1-i.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Windows:
    """Sliding windows of a model's layers; means over all layers."""

    window: int = 0
    """Tokens before itself that a token sees in windowed layers."""
    share: float = 0.0
    """Windowed layers over all; 0: none has a window."""

    def __post_init__(self) -> None:
        if self.window < 0 or not 0 <= self.share <= 1:
            raise PlanError(
                f"a window of {self.window} tokens in a share of {self.share} of the layers: give "
                f"a window of at least 0 and a share from 0 to 1"
            )

    def squares(self, lengths: Ints | Floats, ranks: Ints | int = 1) -> Floats:
        """[S] s^2 of each sequence, the measure of causal attention, less what no row sees.

        Of a ring of `ranks`: `ranks` times the slowest member's. Sequences in one micro-batch add
        up, since the slowest member is the same for all.
        """
        s = np.asarray(lengths, np.float64)
        full: Floats = s * s
        return full - self.share * hidden_squares(s, self.window, ranks) if self.share else full

    def hop_tokens(self, lengths: Ints | Floats, ranks: Ints | int) -> Floats:
        """[S] tokens whose K/V one of a ring's P-1 hops carries, all members together.

        All s where K/V go round; in windowed layers the rows that others see, sent directly, spread
        evenly over hops and members.
        """
        s = np.asarray(lengths, np.float64)
        if not self.share:
            return s
        hops = np.maximum(np.asarray(ranks, np.float64) - 1, 1)
        return s + self.share * (seen_rows(s, self.window, ranks) / hops - s)


NO_WINDOWS = Windows()


def hidden_squares(tokens: Floats, window: int, ranks: Ints | int) -> Floats:
    """[S] what windowed attention lacks of s^2.

    Alone: (s-k)^2, with k = window + 1 keys. A ring takes P times its slowest member, since members
    meet in every layer. Rows early in a sequence see fewer keys than rows behind them, which zigzag
    does not level: the last member, with the two middle chunks, has most pairs, the first one
    fewest. Integrated over the middle chunks, from s/2 (1 - 1/P) to s/2 (1 + 1/P).

    s^2 minus this is twice the slowest member's visible pairs times P, less at most s. It rises
    with s, with the window and with P (min(x, k) is concave, so its mean over an interval around
    s/2 rises as that shrinks), and is at most 4/3 of the even split 2sk - k^2, near k = s/2.
    """
    p = np.asarray(ranks, np.float64)
    k = window + 1.0
    top, bottom = 0.5 * tokens * (1 + 1 / p), 0.5 * tokens * (1 - 1 / p)
    result: Floats = p * (np.maximum(top - k, 0.0) ** 2 - np.maximum(bottom - k, 0.0) ** 2)
    return result


def seen_rows(tokens: Floats, window: int, ranks: Ints | int) -> Floats:
    """[S] rows of others' K/V that all members of a ring receive, together.

    Chunk c looks back min(window, c L) rows, L = s / 2P: member i's first chunk to min(window, i L)
    rows of others; its second one, behind chunk i itself, to min(window, (2P-2-2i) L) more.
    """
    p = np.asarray(ranks, np.float64)
    chunk = tokens / (2 * p)
    return _capped_sum(chunk, window, p - 1) + _capped_sum(2 * chunk, window, p - 1)


def _capped_sum(step: Floats, cap: float, count: Floats) -> Floats:
    """The sum over i = 1 .. count of min(i step, cap)."""
    below = np.minimum(np.floor(cap / step), count)
    result: Floats = 0.5 * step * below * (below + 1) + (count - below) * cap
    return result
