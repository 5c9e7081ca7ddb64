# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The warning comes once, after a window that is off, and only where a profile was given."""

from __future__ import annotations

import pytest

from megatron_hdp.observability.prediction import WARM_UP_STEPS, PredictionWatch


def _said(watch: PredictionWatch, steps: list[tuple[float, float]]) -> list[str]:
    warm = [(1.0, 100.0)] * WARM_UP_STEPS
    return [said for step in warm + steps if (said := watch.observe(*step)) is not None]


@pytest.mark.parametrize("real", [1.3, 0.7])
def test_a_window_that_is_off_is_told_once(real):
    watch = PredictionWatch("mine.json", window=4)
    said = _said(watch, [(1.0, real)] * 40)
    assert len(said) == 1
    assert "mine.json" in said[0]
    assert f"{real:.2f} times" in said[0]


def test_what_fits_stays_silent():
    watch = PredictionWatch("mine.json", window=4)
    assert _said(watch, [(1.0, 1.5), (1.0, 0.5), (1.0, 1.1), (1.0, 1.0)] * 10) == []


def test_a_preset_is_no_promise():
    assert _said(PredictionWatch(None, window=4), [(1.0, 9.0)] * 40) == []
