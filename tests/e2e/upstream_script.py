# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A training script as people have it: Megatron's API only, nothing of HDP.

It builds GPTDataset on TP rank 0 of the first and last pipeline stage, reads its batch there,
broadcasts it, cuts it along context parallel, and returns early on middle stages.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens",
        "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")  # fmt: skip


def get_batch(data_iterator):
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return (None,) * 5
    args = get_args()
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(data_iterator)
        batch = {k: data[k].cuda() if data.get(k) is not None else None for k in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.dataloader_inter_document_masking,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    cp_group = mpu.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return tuple(batch[k] for k in KEYS[:5])


def loss_func(loss_mask, output):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, position_ids, attention_mask = get_batch(data_iterator)
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, loss_mask)


def built_here() -> bool:
    ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    return ends and mpu.get_tensor_model_parallel_rank() == 0


def datasets(num_samples):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, built_here, config).build()


datasets.is_distributed = True

if __name__ == "__main__":
    arguments = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
