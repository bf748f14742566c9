"""Nodes of a chain of datasets: sources, and operators over the nodes below them."""
