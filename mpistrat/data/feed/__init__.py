"""Distributed datasets: the iteration of a dataset over a strategy's replicas."""
