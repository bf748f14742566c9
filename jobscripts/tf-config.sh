#!/bin/bash
# Gives every rank its own TF_CONFIG, for programs that read it. mpistrat itself needs none: MPI tells who is who.
#     srun ./tf-config.sh python train.py
#     mpiexec -n 4 ./tf-config.sh python train.py
# With MPISTRAT_NUM_PS=1 (scripts of `mpistrat job --ps 1` set it) the last rank is a parameter server.
set -eu -o pipefail

# What started this rank says which it is. srun comes last: its variables are also there under mpiexec in a job.
if [ -n "${OMPI_COMM_WORLD_RANK:-}" ]; then
  rank=$OMPI_COMM_WORLD_RANK ranks=$OMPI_COMM_WORLD_SIZE
elif [ -n "${PMI_RANK:-}" ]; then
  rank=$PMI_RANK ranks=$PMI_SIZE
else
  rank=${SLURM_PROCID:?start this with srun or mpiexec} ranks=$SLURM_STEP_NUM_TASKS
fi
servers=${MPISTRAT_NUM_PS:-0}
workers=$((ranks - servers))

# mpistrat opens none of these addresses; they only tell tasks apart. Put real ones here for programs that do.
addresses() { # JOB COUNT
  for ((task = 0; task < $2; task++)); do printf '%s"%s%d:2222"' "${comma:-}" "$1" "$task" && comma=", "; done
}
cluster="\"worker\": [$(addresses worker "$workers")]"
if [ "$servers" -gt 0 ]; then cluster+=", \"ps\": [$(addresses ps "$servers")]"; fi
task="\"type\": \"worker\", \"index\": $rank"
if [ "$rank" -ge "$workers" ]; then task="\"type\": \"ps\", \"index\": $((rank - workers))"; fi

export TF_CONFIG="{\"cluster\": {$cluster}, \"task\": {$task}}"
exec "$@"
