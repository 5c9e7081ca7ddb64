# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Runs scripts/pretrain_gpt.py inside a forked rank and brings back what it computed.

The product is untouched: the recorder sits on Megatron's own `train_step` and `optimizer.step`, and
parameters start from values that depend on their global name alone, so that any layout of the same
model starts equal.
"""

from __future__ import annotations

import os
import runpy
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 128 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --vocab-size 127 --tokenizer-type NullTokenizer "
    "--micro-batch-size 1 --global-batch-size 4 --lr 3e-3 --lr-decay-style constant "
    "--clip-grad 1e9 --eval-iters 1 --eval-interval 1000 --log-interval 1 --transformer-impl local "
    "--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion "
    "--no-bias-dropout-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-workers 0 "
    "--attention-backend unfused --no-persist-layer-norm --split 90,5,5"
).split()


@dataclass
class Recorded:
    """One rank's run."""

    losses: list[float] = field(default_factory=list)
    """Per step; only on the last pipeline stage."""
    grad_norms: list[float] = field(default_factory=list)
    grads: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Per step, before the optimizer: gradient of every parameter here, by global name."""
    params: dict[str, np.ndarray] = field(default_factory=dict)
    """After the last step."""
    partition_dims: dict[str, int] = field(default_factory=dict)
    """Dimension that TP cuts; absent for replicated parameters."""
    coordinates: tuple[int, int] = (0, 0)
    """(TP rank, PP rank)."""
    counts: list[int] = field(default_factory=list)
    """Micro-batches that the schedule ran here, per training step."""
    rings: list[list[int]] = field(default_factory=list)
    """Ring sizes of every training step's plan."""
    head_degrees: list[list[int]] = field(default_factory=list)
    """Members that this rank's micro-batches split heads over, by training step."""
    sequences: list[int] = field(default_factory=list)
    """Sequences in every training step's plan."""
    mixed: int = 0
    """Micro-batches that held ring shards and local sequences."""
    empty_slots: int = 0
    """Zero-loss micro-batches."""
    evaluations: list[float] = field(default_factory=list)
    expert_tokens: list[list[list[int]]] = field(default_factory=list)
    """Tokens per expert and layer, by training step; where a test records them."""


def pretrain(argv: list[str], *, fp64: bool = True, keep_grads: int = 0) -> Recorded:
    """Runs the script with BASE + argv in this process; call it on a forked rank.

    Args:
        keep_grads: record gradients of the first so many steps.
    """
    os.chdir(ROOT)
    sys.argv = [str(SCRIPT), *BASE, *argv]
    return record(lambda: runpy.run_path(str(SCRIPT), run_name="__main__"), fp64, keep_grads)


def plan_with(make) -> None:
    """This process's data iterators get `make(request, num_ranks)` as their planner."""
    from megatron_hdp.runtime import loading

    def make_planner(config, requests, options):
        return make(requests, config.num_ranks)

    loading.make_planner = make_planner


def record(run, fp64: bool, keep_grads: int) -> Recorded:
    """Calls `run` (which trains through megatron.training.pretrain) with the recorder in place."""
    torch.set_num_threads(1)
    if fp64:
        from megatron_hdp.testing import fp64 as double

        double.install()
    _initialise_by_name()
    recorded = Recorded()
    _record_steps(recorded, keep_grads)
    try:
        run()
    except SystemExit as end:  # --exit-interval
        if end.code not in (None, 0):
            raise
    return recorded


def global_name(name: str, model) -> str:
    """Local layer and expert numbers -> numbers over the model; one name for a tied weight."""
    from megatron.core import parallel_state

    name = name.removeprefix("module.").removeprefix("module.")
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        size = parallel_state.get_expert_model_parallel_world_size()
        here = model.config.num_moe_experts // size
        first = here * parallel_state.get_expert_model_parallel_rank()
        parts[at] = str(first + int(parts[at]))
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def _initialise_by_name() -> None:
    from megatron.core import parallel_state
    from megatron.training.models.gpt import GPTModelBuilder

    original = GPTModelBuilder.build_model

    def build_model(self, *args, **kwargs):
        model = original(self, *args, **kwargs)
        tp = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        expert_tp = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        for name, parameter in model.named_parameters():
            size, rank = expert_tp if ".experts." in name else tp
            shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
            cut = getattr(parameter, "tensor_model_parallel", False) and size > 1
            if cut:
                shape[dim] *= size
            seed = zlib.crc32(global_name(name, model).encode())
            values = np.random.RandomState(seed).standard_normal(shape)
            values = 1 + 0.1 * values if "norm" in name else 0.1 * values
            if cut:
                values = np.split(values, size, axis=dim)[rank]
            parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return model

    GPTModelBuilder.build_model = build_model


def _record_steps(recorded: Recorded, keep_grads: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import training

    train_step, evaluate = training.train_step, training.evaluate

    def recording_step(forward_step, iterator, model, optimizer, *args, **kwargs):
        chunks = [get_attr_wrapped_model(m, "decoder", return_model_obj=True) for m in model]
        optimizer_step = optimizer.step

        def step():
            if len(recorded.grads) < keep_grads:
                recorded.grads.append(
                    {
                        global_name(name, inner): parameter.main_grad.double().numpy().copy()
                        for inner in chunks
                        for name, parameter in inner.named_parameters()
                    }
                )
            return optimizer_step()

        optimizer.step = step
        result = train_step(forward_step, iterator, model, optimizer, *args, **kwargs)
        optimizer.step = optimizer_step
        losses, grad_norm = result[0], result[5]
        if grad_norm is None:  # the step was given up: Megatron saves and exits now
            return result
        recorded.grad_norms.append(float(grad_norm))
        if losses:
            recorded.losses.append(float(losses["lm loss"]))
        recorded.coordinates = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        _record_params(recorded, chunks)
        _record_plan(recorded)
        return result

    def recording_evaluate(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        # Overlapped gathers of the last step are complete only when evaluation begins.
        _record_params(
            recorded, [get_attr_wrapped_model(m, "decoder", return_model_obj=True) for m in args[2]]
        )
        if result[0]:
            recorded.evaluations.append(float(result[0]["lm loss"]))
        return result

    training.train_step = recording_step
    training.evaluate = recording_evaluate


def _record_params(recorded: Recorded, chunks) -> None:
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(local_name, chunk)
            recorded.params[name] = parameter.detach().double().numpy().copy()
            whole = ".experts." in name and _expert_tensor_parallel() == 1
            if getattr(parameter, "tensor_model_parallel", False) and not whole:
                recorded.partition_dims[name] = parameter.partition_dim


def _expert_tensor_parallel() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_parallel_world_size()


def _record_plan(recorded: Recorded) -> None:
    from megatron_hdp.runtime import session

    if session._session is not None and session._session.last_plan is not None:
        plan = session.current_session().last_plan
        recorded.sequences.append(plan.num_sequences)
        recorded.rings.append([int(size) for size in plan.ring_sizes])
        slots = session.current_session().last_record.slots
        recorded.counts.append(len(slots))
        recorded.head_degrees.append([s["head_degree"] for s in slots])
        recorded.empty_slots += sum(not s["ring"] and not s["local_tokens"] for s in slots)
        recorded.mixed += sum(bool(s["ring"]) and s["local_tokens"] > 0 for s in slots)


def gather(ranks: list[Recorded], which: str) -> dict[str, np.ndarray]:
    """The whole model's gradients of step 0 ("grads") or final parameters ("params").

    TP shards are joined; every replica is checked to be bitwise equal to the first.
    """
    shards: dict[str, dict[int, np.ndarray]] = {}
    for rank in ranks:
        tensors = rank.grads[0] if which == "grads" else rank.params
        for name, value in tensors.items():
            cut = name in rank.partition_dims
            key = rank.coordinates[0] if cut else 0
            seen = shards.setdefault(name, {}).setdefault(key, value)
            assert np.array_equal(seen, value), f"replicas of {name} differ"
    dims = {name: dim for rank in ranks for name, dim in rank.partition_dims.items()}
    return {
        name: np.concatenate([parts[i] for i in sorted(parts)], axis=dims.get(name, 0))
        if len(parts) > 1
        else parts[min(parts)]
        for name, parts in shards.items()
    }


def worst_error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Largest difference of any tensor over that tensor's largest value."""
    assert got.keys() == wanted.keys()
    return max(
        float(np.abs(got[name] - wanted[name]).max() / np.abs(wanted[name]).max())
        for name in wanted
    )
