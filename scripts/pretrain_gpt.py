# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Pretrain GPT with Megatron's own loop; `--hdp` turns Hybrid Data Parallelism on.

Takes Megatron's arguments plus the `hdp` group. Without `--hdp` it trains as Megatron does; with it
`--data-path` is read as packs of whole documents, and ranks form a ring per long document.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

HDP = "--hdp" in sys.argv[1:]

if HDP:
    import megatron_hdp

    megatron_hdp.enable()
elif "--hdp-cpu" in sys.argv[1:]:
    from megatron_hdp import cpu

    cpu.install()

from megatron_hdp.cpu import faults  # noqa: E402

faults.handle_needed()  # of Megatron's wheel without Transformer Engine, on GPUs too

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    MockGPTDataset,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank  # noqa: E402
from megatron.training import get_args, get_timers, get_tokenizer, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split  # noqa: E402

from megatron_hdp.data.corpus import check_corpora, data_prefixes  # noqa: E402
from megatron_hdp.data.errors import CorpusError  # noqa: E402
from megatron_hdp.data.pack_dataset import DocumentPackDataset, PackDatasetConfig  # noqa: E402
from megatron_hdp.runtime.options import add_hdp_arguments  # noqa: E402

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens",
              "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")  # fmt: skip


def get_batch(data_iterator: Any) -> dict[str, Any]:
    """This rank's next micro-batch, as Megatron's helpers lay it out."""
    args = get_args()
    batch: dict[str, Any] = {}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {key: read[key].cuda(non_blocking=True) if read.get(key) is not None else None
                 for key in BATCH_KEYS}  # fmt: skip
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """(sum of token losses, number of tokens, report). output and loss_mask are [1, t]."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    if get_args().check_for_nan_in_loss_and_grad:
        for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                # Not `loss` itself: the last pipeline stage frees it before a rerun compares it.
                result=report[0],
                rejection_func=rejects,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One micro-batch's forward; the loss is computed by the returned function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """(train, valid, test): packs of documents with `--hdp`, Megatron's samples without."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = PackDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        inter_document_masking=args.dataloader_inter_document_masking,
        hdp_long_documents=args.hdp_long_documents,
    )
    if args.mock_data:
        dataset_class: type[GPTDataset] = MockGPTDataset
    else:
        dataset_class = DocumentPackDataset if HDP else GPTDataset
    builder = BlendedMegatronDatasetBuilder(dataset_class, num_samples, lambda: True, config)
    train, valid, test = builder.build()
    return train, valid, test


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parses, checks the documents against the context, and trains."""
    args = parse_and_validate_args(extra_args_provider=add_hdp_arguments)
    if HDP and not args.mock_data:
        try:
            longest = args.seq_length if args.hdp_long_documents == "fail" else None
            check_corpora(data_prefixes(args), context_length=longest)
        except CorpusError as error:
            raise SystemExit(f"megatron_hdp: {error}") from error
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
