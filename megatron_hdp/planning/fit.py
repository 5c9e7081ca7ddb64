# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fits measured times to the forms that the cost model has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.planning.values import PlanError


@dataclass(frozen=True)
class Fit:
    """Coefficients of the columns, none below zero, and how far the fit is off."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    """Of every row: (fitted - measured) / measured."""

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.errors)


def fit(columns: Sequence[Sequence[float]], measured: Sequence[float]) -> Fit:
    """Least squares of relative errors, without negative coefficients.

    Relative, since a profile spans three orders of magnitude; and a negative time per token, which
    noise could give, would make planners cut sequences without end. The best of all subsets of
    terms whose own optimum is not negative is the constrained optimum.

    Args:
        columns: [terms][rows].
        measured: [rows], positive.

    Raises:
        PlanError: fewer rows than terms, or a measurement that is not positive.
    """
    values = np.asarray(measured, np.float64)
    if len(values) < len(columns) or not (values > 0).all():
        raise PlanError(
            f"{len(values)} measurements {values.tolist()} cannot be fitted with {len(columns)} "
            f"terms: measure more lengths"
        )
    terms = np.stack([np.asarray(column, np.float64) / values for column in columns], 1)
    least, best = np.inf, np.zeros(len(columns))
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            scale = np.linalg.norm(terms[:, chosen], axis=0)
            if not scale.all():
                continue  # a column of zeros: nothing was measured of it
            found, *_ = np.linalg.lstsq(terms[:, chosen] / scale, np.ones(len(values)), rcond=None)
            whole = np.zeros(len(columns))
            whole[list(chosen)] = found / scale
            residual = float(((terms @ whole - 1) ** 2).sum())
            if (found >= 0).all() and residual < least * (1 - 1e-12):
                least, best = residual, whole
    return Fit(tuple(best.tolist()), tuple((terms @ best - 1).tolist()))
