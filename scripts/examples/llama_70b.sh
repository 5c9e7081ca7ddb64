#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# LLaMA-70B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 1024 GPUs, 512K: 2048, 1M: 4096, 2M: 8192, or multiples of them.
TENSOR=8 PIPELINE=4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
    --hdp "$@"
