"""Flat arrays of variables and gradients, and how their sums and weights travel between nodes."""
