#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# LLaMA-13B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 128 GPUs, 512K: 256, 1M: 512, 2M: 1024, or multiples of them.
TENSOR=4 PIPELINE=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 \
    --num-attention-heads 40 --group-query-attention --num-query-groups 8 \
    --hdp "$@"
