# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Triton refuses annotations other than constexpr.
# ruff: noqa: ANN001, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The fused loss in Triton; importing this module needs triton.

Offsets are 64-bit throughout: 16K tokens of a 128K vocabulary pass 2^31 elements. No GPU has run
these kernels yet; the tests run them in Triton's interpreter and compile them for sm_90.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics_kernel(
    logits,
    targets,
    maxima,
    sums,
    target_logits,
    totals,
    columns,
    row_stride,
    column_stride,
    first,
    ACCUMULATE: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row: maximum and sum in one pass over the logits (online softmax)."""
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * row_stride
    maximum = tl.full((), float("-inf"), ACCUMULATE)
    sum_exp = tl.full((), 0.0, ACCUMULATE)
    total = tl.full((), 0.0, ACCUMULATE)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < columns
        values = tl.load(begin + column * column_stride, mask=inside, other=float("-inf"))
        values = values.to(ACCUMULATE)
        above = tl.maximum(maximum, tl.max(values, 0))
        # While all are -inf, -inf - -inf would be NaN.
        shift = tl.where(above == float("-inf"), 0.0, above)
        sum_exp = sum_exp * tl.exp(maximum - shift) + tl.sum(tl.exp(values - shift), 0)
        maximum = above
        if TOTAL:
            total += tl.sum(tl.where(inside, values, 0.0), 0)
    target = tl.load(targets + row) - first
    own = (target >= 0) & (target < columns)
    target_logit = tl.load(begin + target * column_stride, mask=own, other=0.0)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, sum_exp)
    tl.store(target_logits + row, target_logit.to(ACCUMULATE))
    if TOTAL:
        tl.store(totals + row, total)


@triton.jit
def gradient_kernel(
    logits,
    targets,
    maxima,
    sums,
    loss_gradients,
    columns,
    row_stride,
    column_stride,
    first,
    IGNORE_INDEX: tl.constexpr,
    SMOOTHING: tl.constexpr,
    VOCABULARY: tl.constexpr,
    Z_LOSS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and block of columns: logits are replaced by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    at = logits + row * row_stride + column * column_stride
    inside = column < columns
    target = tl.load(targets + row)
    loss_gradient = tl.load(loss_gradients + row).to(ACCUMULATE)
    # Rows without a loss are zeroed, not multiplied by zero, and not even read.
    live = (loss_gradient != 0.0) & (target != IGNORE_INDEX)
    maximum = tl.load(maxima + row)
    sum_exp = tl.load(sums + row)
    read = column < tl.where(live, columns, 0)
    values = tl.load(at, mask=read, other=float("-inf")).to(ACCUMULATE)
    gradient = tl.exp(values - maximum) / sum_exp
    if Z_LOSS > 0:
        gradient *= 1.0 + 2.0 * Z_LOSS * (maximum + tl.log(sum_exp))
    of_target = tl.full((), 1.0 - SMOOTHING, ACCUMULATE)
    gradient -= tl.where(column == target - first, of_target, 0.0)
    if SMOOTHING > 0:
        gradient -= SMOOTHING / VOCABULARY
    gradient = tl.where(live, loss_gradient * gradient, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)
