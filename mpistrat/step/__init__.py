"""The training step: each owner of a block sums the holders' gradients, updates its weights, and publishes them."""
