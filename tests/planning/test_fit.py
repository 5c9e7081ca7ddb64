# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The fit of measured times."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hdp.planning import PlanError
from megatron_hdp.planning.fit import fit

S = np.array([64.0, 128, 256, 512, 1024, 2048])


def test_recovers_what_made_the_numbers():
    wanted = (2e-8, 1e-4, 3e-3)
    found = fit([S * S, S, np.ones(6)], wanted[0] * S * S + wanted[1] * S + wanted[2])
    assert found.coefficients == pytest.approx(wanted, rel=1e-9)
    assert found.worst_error < 1e-12


def test_never_below_zero_and_the_best_of_those():
    """Times that fall below a line through zero: the free optimum has a negative term."""
    values = 1e-4 * S**1.1 - 1e-3
    free = np.linalg.lstsq(np.stack([S * S, S, np.ones(6)], 1) / values[:, None], np.ones(6))[0]
    assert free.min() < 0
    found = fit([S * S, S, np.ones(6)], values)
    assert min(found.coefficients) == 0.0
    residual = sum(error**2 for error in found.errors)
    rng = np.random.RandomState(0)
    for _ in range(500):
        other = np.array(found.coefficients) + np.array([1e-8, 1e-5, 1e-3]) * rng.randn(3)
        other = np.maximum(other, 0)
        fitted = (other[0] * S * S + other[1] * S + other[2]) / values - 1
        assert (fitted**2).sum() >= residual * (1 - 1e-12)


def test_a_column_of_zeros_gets_nothing():
    assert fit([S, np.zeros(6)], 2 * S).coefficients == pytest.approx((2.0, 0.0))


def test_refuses_too_few():
    with pytest.raises(PlanError, match="measure more lengths"):
        fit([S[:2] ** 2, S[:2], np.ones(2)], [1.0, 2.0])
