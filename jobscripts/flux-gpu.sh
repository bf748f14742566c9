#!/bin/bash
# A job for Flux, for the site generic. Submit it with `flux batch FILE`.
# 16 ranks, started by flux, 4 GPUs on each node.
# Name of the job, and its log.
# flux: --job-name=train
# flux: --output={{name}}-{{id}}.out
# Some sites want a queue, a bank, or both:
# flux: # --queue=QUEUE
# flux: # --bank=BANK
# The longest that it may run; a job that asks for less waits less.
# flux: --time-limit=120m
# Nodes, all ranks, cores of each rank, GPUs of each rank.
# flux: --nodes=4
# flux: --nslots=16
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1

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

echo "$(date): job $(flux getattr jobid) on $(flux hostlist local)"
echo "16 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

flux run --nodes=4 --ntasks=16 --cores-per-task=8 --gpus-per-task=1 -o gpu-affinity=per-task "${program[@]}"
