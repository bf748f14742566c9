"""Flat arrays of variables and gradients, and the exchange of their sums and weights between nodes."""
