"""A dataset divided over the replicas of a strategy."""
