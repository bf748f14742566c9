"""Tests on one process, on ranks, over hosts, in SLURM, and what they share."""
