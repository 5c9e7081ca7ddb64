# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Says when steps no longer take the time that the cost model predicts for them."""

from __future__ import annotations

TOLERANCE = 0.2
WARM_UP_STEPS = 2
"""A program's first steps compile, warm up and connect."""


class PredictionWatch:
    """Compares predicted and real seconds over a window of steps, and speaks up once.

    Args:
        profile: the profile file that the prediction rests on. Without one it rests on a preset,
            an estimate for other hardware, and there is nothing to watch.
        window: steps to sum over.
    """

    def __init__(self, profile: str | None, window: int) -> None:
        self._profile = profile
        self._window = window
        self._skip = WARM_UP_STEPS
        self._predicted_s: list[float] = []
        self._real_s: list[float] = []
        self._said = False

    def observe(self, predicted_s: float, real_s: float) -> str | None:
        """Takes one step; the warning, when this step completes a window that is off."""
        if self._profile is None or self._said or not predicted_s:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._predicted_s.append(predicted_s)
        self._real_s.append(real_s)
        if len(self._real_s) < self._window:
            return None
        ratio = sum(self._real_s) / sum(self._predicted_s)
        self._predicted_s, self._real_s = [], []
        if abs(ratio - 1) <= TOLERANCE:
            return None
        self._said = True
        return (
            f"hdp: steps take {ratio:.2f} times what --hdp-profile {self._profile} predicts "
            f"({self._window} steps): balance rests on it, so profile this machine and model again."
        )
