#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Mixtral 8x7B, 256K to 2M tokens of context (CONTEXT): see common.sh for the environment.
# 256K: 256 GPUs, 512K: 512, 1M: 1024, 2M: 2048, or multiples of them.
TENSOR=2 PIPELINE=4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"${LAUNCH[@]}" scripts/pretrain_gpt.py "${COMMON[@]}" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 \
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
    --hdp "$@"
