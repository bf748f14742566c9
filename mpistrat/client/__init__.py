"""A program outside of the job, such as a notebook on a login node, that has the job's ranks run functions."""
