#!/bin/bash
# A job for PBS, for the site generic. Submit it with `qsub FILE`.
# 8 ranks, started by mpich.
# Name of the job and of its log, which has output and errors.
#PBS -N train
#PBS -j oe
# Most sites want a queue, an account, or both:
# PBS -q QUEUE
# PBS -A ACCOUNT
# The longest that it may run; a job that asks for less waits less.
#PBS -l walltime=01:00:00
# Nodes, cores of each node, ranks of each node.
#PBS -l select=2:ncpus=32:mpiprocs=4

set -e -o pipefail
cd "$PBS_O_WORKDIR"

# The environment in which mpistrat is installed, with an mpi4py for the MPI of this job.
source .venv/bin/activate
set -u

# What the program learns of the job: strategy_from_environment() reads the first.
export MPISTRAT_STRATEGY=multi_worker_mirrored
export PYTHONUNBUFFERED=1  # what is printed gets into the log at once
export OMP_NUM_THREADS=8

# The program and its arguments.
program=(python train.py --epochs 10)

echo "$(date): job $PBS_JOBID on $(sort -u "$PBS_NODEFILE" | paste -sd ,)"
echo "8 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

mpiexec -n 8 -ppn 4 "${program[@]}"
