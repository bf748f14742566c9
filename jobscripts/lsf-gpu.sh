#!/bin/bash
# A job for LSF, for the site generic. Submit it with `bsub < FILE`.
# 16 ranks, started by jsrun, 4 GPUs on each node.
# Name of the job, and its log: %J is the job.
#BSUB -J train
#BSUB -o train-%J.out
# Most sites want a queue, a project, or both:
# BSUB -q QUEUE
# BSUB -P PROJECT
# The longest that it may run, in minutes; a job that asks for less waits less.
#BSUB -W 120
# Whole nodes; jsrun below divides them.
#BSUB -nnodes 4

set -e -o pipefail

# The environment in which mpistrat is installed, with an mpi4py for the MPI of this job.
source .venv/bin/activate
set -u

# What the program learns of the job: strategy_from_environment() reads the first.
export MPISTRAT_STRATEGY=multi_worker_mirrored
export PYTHONUNBUFFERED=1  # what is printed gets into the log at once
export OMP_NUM_THREADS=8

# The program and its arguments.
program=(python train.py --epochs 10)

echo "$(date): job $LSB_JOBID"
echo "16 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

jsrun --nrs 16 --rs_per_host 4 --tasks_per_rs 1 --cpu_per_rs 8 --bind packed:8 --gpu_per_rs 1 "${program[@]}"
