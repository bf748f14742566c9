"""How tests are chosen, timed, and run on ranks, hosts and SLURM."""
