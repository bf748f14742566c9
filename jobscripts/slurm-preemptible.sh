#!/bin/bash
# A job for SLURM, for the site generic. Submit it with `sbatch FILE`.
# 8 ranks, started by srun, may be interrupted and goes on.
# Name of the job and of its log: %x is the name, %j the job.
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
# Most sites want a partition, an account, or both:
# SBATCH --partition=PARTITION
# SBATCH --account=ACCOUNT
# The longest that it may run; a job that asks for less waits less.
#SBATCH --time=01:00:00
# 120 seconds before that, SIGUSR1 goes to the ranks: they save and end with status 42.
#SBATCH --signal=USR1@120
# The job may go back into the queue, and then goes on in the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
# Nodes, ranks of each node, cores of each rank.
#SBATCH --nodes=2
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

echo "$(date): job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
echo "8 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

# How srun starts MPI. Where every rank is "0 of 1", say it here: export SLURM_MPI_TYPE=pmi2 for MPICH, =pmix for Open MPI.
mpi="${SLURM_MPI_TYPE:-$(scontrol show config 2>/dev/null | awk '$1 == "MpiDefault" {print $3}' || true)}"
# Over UCX, MPICH's lines are too long for SLURM's PMI2: MPI_Init fails, or hangs. Over libfabric (ofi) they are short.
if [ "$mpi" = pmi2 ]; then export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"; fi
# SLURM signals the ranks. All of them end with status 42 then, but not at the same moment: so the first to end does not end
# the others at once (--kill-on-bad-exit=1), but after a minute.
trap : USR1  # for them, not for this script
status=0
srun --kill-on-bad-exit=0 --wait=60 "${program[@]}" || status=$?

# Status 42: stopped early, everything is saved. Unless somebody cancelled it, the job goes back into the queue.
job="$SLURM_JOB_ID"
state=$(scontrol show job "$job" || true)
again=""
if [ "$status" -eq 42 ]; then again=yes; fi
case $state in *JobState=CANCELLED*) again="" ;; esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge 10 ]; then again=""; fi
if [ -n "$again" ]; then scontrol requeue "$job"; fi
exit "$status"
