#!/usr/bin/env bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# A task of srun.sbatch: SLURM's task numbers under the names that torch.distributed reads.
set -euo pipefail
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$SLURM_GPUS_ON_NODE"
exec "$@"
