#!/bin/bash
# A job for SLURM, for the site generic. Submit it with `sbatch FILE`.
# 16 ranks, started by srun, 4 GPUs on each node, in a container.
# Name of the job and of its log: %x is the name, %j the job.
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
# Most sites want a partition, an account, or both:
# SBATCH --partition=PARTITION
# SBATCH --account=ACCOUNT
# The longest that it may run; a job that asks for less waits less.
#SBATCH --time=02:00:00
# Nodes, ranks of each node, cores of each rank.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
# GPUs. mpistrat gives every rank of a node its own; a rank that sees only one takes that.
#SBATCH --gpus-per-node=4

set -e -o pipefail

set -u

# What the program learns of the job: strategy_from_environment() reads the first.
export MPISTRAT_STRATEGY=multi_worker_mirrored
export PYTHONUNBUFFERED=1  # what is printed gets into the log at once
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-8}"
# Since SLURM 22.05 srun does not take over --cpus-per-task.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}"

# Each rank runs in the image; the MPI inside must fit the launcher outside.
program=(apptainer exec --nv mpistrat.sif python train.py --epochs 10)

echo "$(date): job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
echo "16 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v apptainer)"

# How srun and the MPI of this job find each other.
# A rank that fails ends the job at once; under MPICH the others would wait for it for ever.
srun --kill-on-bad-exit=1 --mpi=pmix "${program[@]}"
