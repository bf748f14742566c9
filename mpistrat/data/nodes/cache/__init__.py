"""Rows cached in memory: by each rank, or by the ranks of a node or a job together."""
