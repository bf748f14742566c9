"""Monitors of ranks: the activity of each, which ones have left, failed or were killed, and how that ends the job."""
