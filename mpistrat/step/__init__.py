"""The training step: each owner of a block sums what the holders have of it, updates it, and publishes the new weights."""
