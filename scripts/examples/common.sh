# shellcheck shell=bash disable=SC2034 # LAUNCH and COMMON are read by the examples
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Sourced by every example, after it has set TENSOR and PIPELINE: who launches, and what all share.
#
# Environment, in brackets what is taken without it:
#   DATA, TOKENIZER, CHECKPOINTS   corpus prefix(es), Hugging Face tokenizer, folder; paths from the
#                                  project's root, or absolute: must be given
#   CONTEXT [262144]               tokens of the longest sequence
#   CAPACITY [8192]                tokens a rank holds; fewer GPUs need more of them
#   TOKENS_PER_STEP [33554432]     as in the paper; a batch is that over CONTEXT
#   STEPS [2000], GPUS_PER_NODE [8], NODES [as few as hold one sequence of CONTEXT]
#   NODE_RANK, MASTER_ADDR, MASTER_PORT   on more than one node, without SLURM
#   SBATCH                         scripts/slurm/torchrun.sbatch or srun.sbatch: submit with it

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${DATA:?is the prefix of your corpus}" "${TOKENIZER:?is a Hugging Face tokenizer}"
: "${CHECKPOINTS:?is a folder that all nodes see}"
CONTEXT=${CONTEXT:-262144}
CONTEXT_PARALLEL=$((CONTEXT / ${CAPACITY:-8192}))
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GPUS=$((TENSOR * PIPELINE * CONTEXT_PARALLEL))
NODES=${NODES:-$(((GPUS + GPUS_PER_NODE - 1) / GPUS_PER_NODE))}
export CUDA_DEVICE_MAX_CONNECTIONS=1

LAUNCH=(torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}")
if [ -n "${SBATCH:-}" ]; then
    LAUNCH=(sbatch --nodes "$NODES" --gpus-per-node "$GPUS_PER_NODE" "$SBATCH")
fi

read -ra DATA_PATH <<<"$DATA" # weights and prefixes of a blend
# shellcheck disable=SC2054 # commas of Megatron's own
COMMON=(
    --seq-length "$CONTEXT" --max-position-embeddings "$CONTEXT"
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.01
    --tensor-model-parallel-size "$TENSOR" --sequence-parallel
    --pipeline-model-parallel-size "$PIPELINE" --context-parallel-size "$CONTEXT_PARALLEL"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size "$((${TOKENS_PER_STEP:-33554432} / CONTEXT))"
    --train-iters "${STEPS:-2000}" --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --data-path "${DATA_PATH[@]}" --split 98,1,1
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 200
    --dist-ckpt-optim-fully-reshardable
    --eval-interval 500 --eval-iters 1 --log-interval 1
)
