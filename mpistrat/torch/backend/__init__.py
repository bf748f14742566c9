"""A backend of torch.distributed over MPI: every operation of c10d, inside the contract of the package's process groups."""
