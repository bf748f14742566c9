"""torch.distributed over MPI: the backends "mpistrat" and "mpi", and a rendezvous without variables for all backends."""
