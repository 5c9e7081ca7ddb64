#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# LLaMA-30B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 256 GPUs, 512K: 512, 1M: 1024, 2M: 2048, or multiples of them.
# The paper's 56 heads do not divide its hidden size: they get 128 channels each.
TENSOR=8 PIPELINE=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 60 --hidden-size 6656 --ffn-hidden-size 17920 \
    --num-attention-heads 56 --kv-channels 128 --group-query-attention --num-query-groups 8 \
    --hdp "$@"
