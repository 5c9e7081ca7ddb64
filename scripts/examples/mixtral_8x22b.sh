#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Mixtral 8x22B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 1024 GPUs, 512K: 2048, 1M: 4096, 2M: 8192, or multiples of them.
TENSOR=4 PIPELINE=8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 \
    --num-attention-heads 48 --group-query-attention --num-query-groups 8 \
    --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 \
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
    --hdp "$@"
