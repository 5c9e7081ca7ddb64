# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Logits of every kind through both losses, against the definition in fp64.

The chunked loss is handed the identity as hidden states: its weight is then the logits, and its
weight's gradient theirs.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_hdp.cpu.launch import run_ranks

RANKS = (1, 2, 4)
NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass
class Case:
    """Logits of the whole vocabulary, and what the loss is to make of them."""

    logits: torch.Tensor
    targets: torch.Tensor
    loss_gradients: torch.Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    strided: bool = False


def _case(rows: int, columns: int, dtype=torch.float64, scale: float = 3.0, **more) -> Case:
    generator = torch.Generator().manual_seed(rows * columns)
    logits = scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, columns, (rows,), generator=generator)
    targets[0], targets[-1] = columns - 1, 0
    gradients = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    return Case(logits.to(dtype), targets, gradients, **more)


def _masked() -> Case:
    """Rows without a loss: by a zero gradient, by the ignore index; their logits are rubbish."""
    case = _case(7, 40)
    case.loss_gradients[[1, 4]] = 0
    case.targets[[2, 4]] = -100
    case.logits[2] = NAN
    return case


def _nothing_counts() -> Case:
    case = _case(3, 40)
    case.targets[:] = -100
    return case


def _minus_infinity() -> Case:
    """Single entries, and all of the last quarter: with 4 ranks, a shard without one number."""
    case = _case(4, 40)
    case.targets[:] = torch.tensor([3, 0, 29, 11])
    case.logits[0, [0, 5]] = -INF
    case.logits[:, 30:] = -INF
    return case


def _targets_in_one_shard() -> Case:
    case = _case(5, 40)
    case.targets[:] = torch.arange(5)
    return case


def _large() -> Case:
    case = _case(6, 40, scale=1.0)
    case.logits[:3] += 1e4
    case.logits[3:] -= 1e4
    case.logits[0, 7], case.logits[4, 8] = -1e4, 1e4
    return case


CASES = {
    "vocabulary of 7": lambda: _case(5, 7),
    "vocabulary of 4 x 7": lambda: _case(5, 28),
    "vocabulary of 150,000": lambda: _case(3, 150_000, torch.float32),
    "one token": lambda: _case(1, 332),
    "vocabulary of 4 x 331": lambda: _case(9, 4 * 331),
    "large logits": _large,
    "masked rows": _masked,
    "nothing counts": _nothing_counts,
    "-inf entries": _minus_infinity,
    "targets in one shard": _targets_in_one_shard,
    "label smoothing": lambda: _case(5, 76, label_smoothing=0.1),
    "z-loss": lambda: _case(5, 76, z_loss=1e-2),
    "smoothing and z-loss": lambda: _case(5, 76, label_smoothing=0.3, z_loss=1e-3),
    "strided": lambda: _case(5, 76, strided=True),
    "bf16": lambda: _case(5, 4 * 331, torch.bfloat16, label_smoothing=0.1, z_loss=1e-3),
    "fp16": lambda: _case(5, 4 * 331, torch.float16, label_smoothing=0.1, z_loss=1e-3),
    "fp32": lambda: _case(5, 4 * 331, torch.float32, label_smoothing=0.1, z_loss=1e-3),
    "bf16, large": lambda: dataclasses.replace(_large(), logits=_large().logits.bfloat16()),
    "fp32, large": lambda: dataclasses.replace(_large(), logits=_large().logits.float()),
}
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 2e-6),
    torch.float16: (2e-6, 1e-3),
    torch.bfloat16: (2e-6, 8e-3),
}
"""Of the loss (always fp32 or better), and of the gradient (rounded once to the logits' dtype)."""


def _expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, gradient of the logits), by the definition, in fp64."""
    counts = case.targets >= 0
    logits = torch.where(counts[:, None], case.logits.double(), 0.0).requires_grad_()
    log_p = logits.log_softmax(-1)
    targets, smoothing = case.targets.clamp(min=0), case.label_smoothing
    losses = -log_p.gather(1, targets[:, None]).squeeze(1)
    if smoothing:
        others = -(log_p.sum(-1) + losses)
        losses = (1 - smoothing) * losses + smoothing * others / (logits.shape[1] - 1)
    losses = losses + case.z_loss * logits.logsumexp(-1) ** 2
    losses = torch.where(counts, losses, 0.0)
    (losses * case.loss_gradients).sum().backward()
    return losses.detach(), logits.grad


def _fused(case: Case, shard: torch.Tensor, group, terms):
    from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy

    leaf = shard.clone().requires_grad_()
    if case.strided:  # every other column of every other row of something larger
        wide = torch.zeros(2 * len(shard), 2 * shard.shape[1], dtype=shard.dtype)
        logits = (wide.index_put((torch.arange(0, len(wide), 2)[:, None],
                                  torch.arange(0, wide.shape[1], 2)), leaf))[::2, ::2]  # fmt: skip
        assert not logits.is_contiguous()
    else:
        logits = leaf * 1
    where = logits.data_ptr()
    losses = fused_cross_entropy(logits, case.targets, group, terms)
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    return losses, leaf, (lambda: seen == [where] or case.strided), (lambda g: g)


def _chunked(case: Case, shard: torch.Tensor, group, terms):
    from megatron_hdp.runtime.cross_entropy.chunked import Projection, linear_cross_entropy

    weight = shard.t().contiguous().requires_grad_()
    hidden = torch.eye(len(shard), dtype=shard.dtype)
    projection = Projection(group, chunk=2)
    losses = linear_cross_entropy(hidden, weight, case.targets, projection, terms)
    return losses, weight, lambda: True, lambda gradient: gradient.t()


def errors(mode: str, ranks: int) -> list[dict[str, tuple[float, float]]]:
    """Of every case, per rank: largest relative error of the loss and of the gradient."""

    def run():
        import torch.distributed as dist

        from megatron_hdp.runtime.cross_entropy.statistics import LossTerms

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        group = dist.group.WORLD if ranks > 1 else None
        found = {}
        for name, make in CASES.items():
            case = make()
            if case.logits.shape[1] % ranks:
                continue
            if mode == "chunked" and not case.logits.isfinite().all():
                continue  # a product with the identity would spread it over the rows
            expected_losses, expected_gradient = _expected(case)
            shard = case.logits.chunk(ranks, 1)[dist.get_rank()]
            terms = LossTerms(case.label_smoothing, case.z_loss)
            compute = {"fused": _fused, "chunked": _chunked}[mode]
            losses, leaf, in_place, logits_of = compute(case, shard, group, terms)
            losses.backward(case.loss_gradients.to(losses.dtype))
            assert losses.dtype == torch.promote_types(case.logits.dtype, torch.float32)
            assert in_place(), name
            expected_shard = expected_gradient.chunk(ranks, 1)[dist.get_rank()]
            found[name] = (
                relative_error(losses.detach(), expected_losses, expected_losses.abs()),
                relative_error(logits_of(leaf.grad), expected_shard, expected_gradient.abs().max()),
            )
        return found

    return run_ranks(run, ranks, timeout_s=200)


def relative_error(got: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest difference over its scale, at least 1e-3; NaN where anything is not finite."""
    if not got.isfinite().all():
        return NAN
    return float(((got.double() - wanted).abs() / scale.clamp(min=1e-3)).max())


def check(mode: str, ranks: int) -> None:
    """Fails where a case's loss or gradient is off, or where one did not run that should have."""
    ran = set()
    for rank in errors(mode, ranks):
        for name, (loss, gradient) in rank.items():
            of_loss, of_gradient = TOLERANCES[CASES[name]().logits.dtype]
            assert loss <= of_loss, f"{name}: loss off by {loss}"
            assert gradient <= of_gradient, f"{name}: gradient off by {gradient}"
            ran.add(name)
    left_out = {"masked rows", "-inf entries"} if mode == "chunked" else set()
    if ranks > 1:
        left_out = left_out | {"vocabulary of 7"}
    assert ran == CASES.keys() - left_out
