"""Functions that ranks run for another rank, the coordinator, or for a program outside of the job, the client."""
