#!/bin/bash
# A job for SLURM, for the site generic. Submit it with `sbatch FILE`.
# 4 ranks, started by srun, an array of jobs.
# Name of the job and of its log: %x is the name, %j the job, %A and %a the array and its task.
#SBATCH --job-name=train
#SBATCH --output=%x-%A_%a.out
# The tasks of the array; behind % how many run at a time.
#SBATCH --array=0-9%4
# Most sites want a partition, an account, or both:
# SBATCH --partition=PARTITION
# SBATCH --account=ACCOUNT
# The longest that it may run; a job that asks for less waits less.
#SBATCH --time=01:00:00
# Nodes, ranks of each node, cores of each rank.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8

set -e -o pipefail

# The environment in which mpistrat is installed, with an mpi4py for the MPI of this job.
source .venv/bin/activate
set -u

# What the program learns of the job: strategy_from_environment() reads the first.
export MPISTRAT_STRATEGY=multi_worker_mirrored
export PYTHONUNBUFFERED=1  # what is printed gets into the log at once
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-8}"
# Since SLURM 22.05 srun does not take over --cpus-per-task.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}"

# The program and its arguments.
program=(python train.py --epochs 10)
folder=results/"$SLURM_ARRAY_TASK_ID"  # of this task
mkdir -p "$folder"
program+=(--seed "$SLURM_ARRAY_TASK_ID" --output "$folder")

echo "$(date): job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
echo "4 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

# How srun starts MPI. Where every rank is "0 of 1", say it here: export SLURM_MPI_TYPE=pmi2 for MPICH, =pmix for Open MPI.
mpi="${SLURM_MPI_TYPE:-$(scontrol show config 2>/dev/null | awk '$1 == "MpiDefault" {print $3}' || true)}"
# Over UCX, MPICH's lines are too long for SLURM's PMI2: MPI_Init fails, or hangs. Over libfabric (ofi) they are short.
if [ "$mpi" = pmi2 ]; then export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"; fi
# A rank that fails ends the job at once; under MPICH the others would wait for it for ever.
srun --kill-on-bad-exit=1 "${program[@]}"
