# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The launch line's model with few layers, as Megatron builds and wraps it, fed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.planning.values import MicroBatch, Ring
from megatron_hdp.planning.values import Sequence as SequenceOf
from megatron_hdp.runtime.context import CurrentMicroBatch, running
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.session import current_session
from megatron_hdp.runtime.sharding import MicroBatchLayout


class Probe:
    """Model, wrapper and optimizer; Megatron's arguments are parsed, its groups are made."""

    def __init__(self, args: Any) -> None:
        from megatron.training.argument_utils import (
            gpt_config_from_args,
            pretrain_cfg_container_from_args,
        )
        from megatron.training.training import setup_model_and_optimizer

        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        models, self.optimizer, _ = setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.args = args
        self.wrapped = models[0]
        self.domain = current_session().require_domain()
        self.model = get_attr_wrapped_model(self.wrapped, "decoder", return_model_obj=True)
        self.device = next(self.model.parameters()).device
        self._slots = 0

    @property
    def num_layers(self) -> int:
        return len(self.model.decoder.layers)

    def micro_batch(self, lengths: Sequence[int], ring: int = 1) -> CurrentMicroBatch:
        """Random tokens of whole sequences, on this rank or on a ring of the first `ring` ones."""
        sequences = tuple(SequenceOf(i, length) for i, length in enumerate(lengths))
        micro_batch = (
            MicroBatch(0, Ring(tuple(range(ring))), sequences, ())
            if ring > 1
            else MicroBatch(0, None, (), sequences)
        )
        parallel = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        layout = MicroBatchLayout.build(micro_batch, self.domain.rank, multiple_of=parallel)
        self._slots += 1  # transfers of different micro-batches never pair
        state = MicroBatchState.build(
            layout,
            step=0,
            slot=self._slots,
            step_tokens=sum(lengths),
            communicators=self.domain.communicators,
            device=self.device,
        )
        size = (1, layout.num_tokens)
        tokens = torch.randint(0, self.args.padded_vocab_size, size, device=self.device)
        batch: dict[str, torch.Tensor | None] = {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "loss_mask": torch.ones(size, device=self.device),
            "position_ids": state.positions[None],
        }
        return CurrentMicroBatch(state, batch)

    def forward(self, micro_batch: CurrentMicroBatch) -> torch.Tensor:
        """The sum of token losses, as Megatron's script has it."""
        batch = micro_batch.batch
        with running(micro_batch):
            output = self.wrapped(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"]
            )
        mask = batch["loss_mask"]
        assert mask is not None
        return torch.sum(output.view(-1).float() * mask.view(-1))

    def forward_and_backward(self, micro_batch: CurrentMicroBatch) -> None:
        """One micro-batch; gradients stay on this rank."""
        with self.wrapped.no_sync():
            self.forward(micro_batch).backward()

    def decoder_of(self, micro_batch: CurrentMicroBatch) -> tuple[DecoderForward, Call]:
        """(forward, forward and backward) of the layers alone, on this micro-batch."""
        seen: list[dict[str, Any]] = []

        def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(kwargs)

        hook = self.model.decoder.register_forward_pre_hook(keep, with_kwargs=True)
        with torch.no_grad(), self.wrapped.no_sync():
            self.forward(micro_batch)
        hook.remove()
        forward = DecoderForward(self.model.decoder, seen[0])

        def both() -> None:
            with self.wrapped.no_sync():
                output = forward()
                output.backward(torch.ones_like(output))

        return forward, both


class DecoderForward:
    """The decoder on inputs that it was seen to get."""

    def __init__(self, decoder: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self._decoder = decoder
        self._inputs = dict(inputs)
        self._hidden = self._inputs.pop("hidden_states").detach().requires_grad_()

    def __call__(self) -> torch.Tensor:
        output: torch.Tensor = self._decoder(hidden_states=self._hidden, **self._inputs)
        return output

    @property
    def shared(self) -> list[torch.Tensor]:
        """Inputs of all layers alike, as RoPE's frequencies."""
        values = [v for value in self._inputs.values() for v in
                  (value if isinstance(value, tuple | list) else [value])]  # fmt: skip
        return [value for value in values if isinstance(value, torch.Tensor)]


Call = Callable[[], object]
