#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# LLaMA-7B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 64 GPUs, 512K: 128, 1M: 256, 2M: 512, or multiples of them.
TENSOR=2 PIPELINE=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --hdp "$@"
