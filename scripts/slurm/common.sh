# shellcheck shell=bash
# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# Sourced by the .sbatch files: where the ranks meet, the container, and what a signal does.
#
#   run_and_requeue COMMAND...   one job step; after SIGUSR1 it is asked to save, then requeued
#
# Environment: PYTHON, CONTAINER (an image for pyxis), CONTAINER_MOUNTS.

set -euo pipefail
PYTHON=${PYTHON:-python}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # two jobs on one node must not meet
export MASTER_ADDR MASTER_PORT
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # Megatron's order of kernels
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# srun takes it from the job no more since SLURM 22.05
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Written from pyxis's documentation: no machine with pyxis or enroot has run it.
CONTAINER_OPTIONS=()
if [ -n "${CONTAINER:-}" ]; then
    CONTAINER_OPTIONS=(--container-image="$CONTAINER" --container-workdir="$PWD"
        --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi

# Megatron's own: on the signal every rank ends after the same step, with a checkpoint in --save.
# shellcheck disable=SC2034 # read by the .sbatch files
SAVE_ON_SIGNAL=(--exit-signal-handler --exit-signal SIGUSR1)

run_and_requeue() {
    local preempted='' code=0 step
    trap 'preempted=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1 # all steps, not this script
    srun "${CONTAINER_OPTIONS[@]}" "$@" &
    step=$!
    wait "$step" || code=$?
    while kill -0 "$step" 2>/dev/null; do # a signal ends `wait`, not the step
        code=0
        wait "$step" || code=$?
    done
    if [ -n "$preempted" ]; then
        echo "job $SLURM_JOB_ID got SIGUSR1: its step ended with $code, and it is requeued"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
