#!/bin/bash
# A job for SLURM, for the site generic. Submit it with `sbatch FILE`.
# 8 ranks, started by openmpi, may be interrupted and goes on.
# Name of the job and of its log: %x is the name, %j the job.
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
# Most sites want a partition, an account, or both:
# SBATCH --partition=PARTITION
# SBATCH --account=ACCOUNT
# The longest that it may run; a job that asks for less waits less.
#SBATCH --time=01:00:00
# 120 seconds before that, SIGUSR1 goes to this script, which hands it on: they save and end with status 42.
#SBATCH --signal=B:USR1@120
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

# The program and its arguments.
program=(python train.py --epochs 10)

echo "$(date): job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
echo "8 ranks with $OMP_NUM_THREADS threads each, strategy $MPISTRAT_STRATEGY: $(command -v python)"

# SLURM signals this script, and the script the launcher, which hands it on to the ranks. A trap ends `wait` early:
# then wait again, for the launcher's own status.
ranks=""
trap 'signalled=yes; [ -z "$ranks" ] || kill -USR1 "$ranks" 2>/dev/null || true' USR1 TERM
mpirun -n 8 --map-by ppr:4:node --bind-to none -x MPISTRAT_STRATEGY -x OMP_NUM_THREADS -x PYTHONUNBUFFERED "${program[@]}" &
ranks=$!
signalled=yes
while [ -n "$signalled" ]; do
  signalled="" status=0
  wait "$ranks" || status=$?
done

# Status 42: stopped early, everything is saved. Unless somebody cancelled it, the job goes back into the queue.
job="$SLURM_JOB_ID"
state=$(scontrol show job "$job" || true)
again=""
if [ "$status" -eq 42 ]; then again=yes; fi
# mpirun ends on a preemption's SIGTERM, with status 0 or another: the job then goes on from what it saved last.
case $state in *PreemptTime=[0-9]*) again=yes ;; esac
case $state in *JobState=CANCELLED*) again="" ;; esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge 10 ]; then again=""; fi
if [ -n "$again" ]; then scontrol requeue "$job"; fi
exit "$status"
