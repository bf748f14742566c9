"""Rows kept in memory: by each rank for itself, or by the ranks of a node or a job together."""
